"""What the documents say holds: examples are accepted, names are those that exist, tables come from cells."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from benchmarks.quality_markdown import BEGIN, END, put_between_marks, quality_section, read_cells
from benchmarks.quality_run import ANEW, PLAIN, STALE, VISIBLE, WITHHELD, Cell, CellFile
from policies.budget import LayerShape, plan_budgets
from policies.decoding import RULES, get_rule
from policies.named import NAMED, choose_recipe
from policies.policy import Policy
from policies.recipe import FIELDS, Recipe
from policies.recipe_options import OPTIONS
from policies.spans import PromptMap

ROOT = Path(__file__).parent.parent
POLICIES_PAGE = (ROOT / "docs" / "policies.md").read_text()
README = (ROOT / "README.md").read_text()

CODE = ["def", " f", "(x):", "\n", "    return x", "\n"]
PROMPT = PromptMap(
    5000,
    {"system": (3, 40), "question": (4900, 4990)},
    tail=10,
    pieces=[*CODE, *["word "] * (5000 - len(CODE))],
)
"""A chat about a document, as long as the page says where it matters."""

SMOLLM2 = [LayerShape(index, 3, 256) for index in range(30)]


def json_values(text: str) -> list[object]:
    """All values of a fenced block, one after another."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        value, at = decoder.raw_decode(text, at)
        found.append(value)
    return found


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


POLICIES_EXAMPLES = [value for block in fenced(POLICIES_PAGE, "json") for value in json_values(block)]
README_EXAMPLES = [
    *(
        ast.literal_eval(body)["kv"]
        for block in fenced(README, "python")
        for body in re.findall(r"extra_body=(\{.*\{.*\})", block)
    ),
    *(
        ast.literal_eval(body)
        for block in fenced(README, "python")
        for body in re.findall(r"^kv = (.*?)  #", block, re.MULTILINE)
    ),
]


def chosen(kv: object) -> Recipe:
    """The recipe of a request's `kv` field, or the error with which it is refused."""
    given = {"recipe": kv} if isinstance(kv, str) else dict(kv)  # type: ignore[call-overload]
    given.pop("report", None)  # of the request, not of the recipe
    return choose_recipe(given, PROMPT)


def test_the_pages_have_their_examples():
    assert len(POLICIES_EXAMPLES) >= 20 and len(README_EXAMPLES) >= 5


@pytest.mark.parametrize("kv", [*POLICIES_EXAMPLES, *README_EXAMPLES], ids=json.dumps)
def test_examples_are_recipes_that_a_model_can_plan_for(kv: object):
    recipe = chosen(kv)
    budgets = plan_budgets(recipe, PROMPT.tokens, SMOLLM2)
    assert all(0 < budget <= PROMPT.tokens for budget in budgets)
    assert any(budget < PROMPT.tokens for budget in budgets) or recipe.decode.evicts
    assert get_rule(recipe).evicts == recipe.decode.evicts


def test_every_name_that_a_recipe_may_use_is_explained():
    names = {*OPTIONS, *RULES, *NAMED} - {name for name in OPTIONS if ":" in name}
    missing = [name for name in names if f"`{name}`" not in POLICIES_PAGE]
    assert not missing
    # Resolved ones are what `protect` becomes; nobody asks for them.
    fields = set(FIELDS) - {"spans", "structure"}
    assert not [
        name for name in fields if f"`{name}" not in POLICIES_PAGE and f'"{name}"' not in POLICIES_PAGE
    ]


def test_links_into_the_page_and_the_repository_lead_somewhere():
    headings = re.findall(r"^#+ (.*)$", POLICIES_PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", POLICIES_PAGE):
        if target.startswith("#"):
            assert target[1:] in anchors
        else:
            assert (ROOT / "docs" / target).exists(), target
    for path in re.findall(r"`((?:tests|docs|policies|engine|benchmarks)/[\w/]+\.\w+)", POLICIES_PAGE):
        assert (ROOT / path).exists(), path


def test_the_page_has_its_measurements():
    table = POLICIES_PAGE.partition(BEGIN)[2].partition(END)[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 20, "put in by python -m benchmarks.quality_markdown"


def test_what_the_page_tells_about_scorers_is_in_the_policy_class():
    for name in ("score", "keep", "protected", "observer", "needs", "options"):
        assert f"`{name}`" in POLICIES_PAGE and (hasattr(Policy, name) or name in Policy.__annotations__)


def cell(name: str, mode: str, method: str, budget: float | None, sample: int = 0, **values: float) -> Cell:
    payload = 100 if budget is None else round(100 * budget)
    return Cell(name, sample, mode, method, budget, "id", 1000, payload, payload + 5, 100, **values)  # type: ignore[arg-type]


CELLS = [
    cell("far (full)", VISIBLE, "full", None, mark=0.0),
    cell("far (full)", WITHHELD, "full", None, mark=0.0),
    cell("near (full)", VISIBLE, "full", None, mark=1.0),
    cell("near", VISIBLE, "full", None, mark=1.0),
    cell("near", VISIBLE, "full", None, sample=1, mark=1.0),
    cell("near", VISIBLE, "snapkv", 0.5, mark=1.0),
    cell("near", VISIBLE, "snapkv", 0.5, sample=1, mark=1.0),
    cell("near", VISIBLE, "snapkv", 0.25, mark=1.0),
    cell("near", VISIBLE, "snapkv", 0.25, sample=1, mark=0.0),
    cell("text", PLAIN, "full", None, kl=0.0, agree=1.0),
    cell("text", PLAIN, "snapkv", 0.5, kl=0.01, agree=0.9),
    cell("text", PLAIN, "snapkv", 0.25, kl=0.2, agree=0.5),
    cell("second", ANEW, "full", None, mark=1.0),
    cell("second", STALE, "full", None, mark=1.0),
    cell("second", STALE, "snapkv", 0.5, mark=0.0),
]


def test_cells_become_the_pages_tables(tmp_path: Path):
    CellFile(tmp_path / "cells.jsonl", "a").add(CELLS)
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"set": "cut o')  # a run that is being written
    section = quality_section(read_cells(tmp_path / "cells.jsonl"))
    lines = section.splitlines()
    assert "| far | 1 | 1000 | 0.00 | 0.00 | left out |" in lines
    assert "| near | 2 | 1000 | 1.00 | – |  |" in lines
    (snapkv,) = (line for line in lines if line.startswith("| `snapkv` | 0.50 / 0.25 |"))
    assert "| 0.010 / 0.200 | 0.90 / 0.50 | 1.00 / 0.50 | – | – | 0.00 / – |" in snapkv
    assert snapkv.endswith("| 0 / 1 of 2 |")
    assert any(line.startswith("| near, visible | 1.00 | 1.00 / 0.50 | –") for line in lines)


def test_tables_replace_what_stood_between_the_marks_and_nothing_else():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put_between_marks(page, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert put_between_marks(put_between_marks(page, "new"), "newer") == put_between_marks(page, "newer")
    assert put_between_marks(POLICIES_PAGE, "new").count("\nnew\n") == 1
    with pytest.raises(ValueError, match="lacks the lines"):
        put_between_marks("before\nafter\n", "new")


def test_every_fault_that_such_systems_had_has_a_test_of_its_own():
    """Cases 1 to 27, by the name of a test (`test_o7_...`) or by its docstring (an O and the number)."""
    named: set[str] = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                named.update(re.findall(r"^test_o(\d+)_", node.name))
                named.update(re.findall(r"\bO-(\d+)\b", ast.get_docstring(node) or ""))
    assert not {str(number) for number in range(1, 28)} - named

"""How many tokens each layer keeps: one number per kv head of every layer that policies act on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from policies.recipe import Recipe
from policies.recipe_checks import RecipeError, budget_bytes
from policies.recipe_rules import check_protected_fit, protected_parts


@dataclass(frozen=True)
class LayerShape:
    """One scored layer: its number (the one `bands` mean), kv heads, and bytes of K and V of one token of one head."""

    index: int
    kv_heads: int
    token_bytes: int


def plan_budgets(recipe: Recipe, n: int, layers: Sequence[LayerShape]) -> tuple[int, ...]:
    """Tokens to keep per kv head of an `n`-token prompt, for each of `layers` in order; at most `n`, exact.

    Where something is evicted at all, every budget holds the recipe's protected tokens. Uniform and pyramid budgets
    of the same recipe come to the same number of tokens over the layers. Budgets in bytes are the largest whose
    survivors fit; layers in a band have theirs first. Bands that name no layer of `layers` do nothing.
    Raises `RecipeError` ("budget", "bands") where the protected tokens of this prompt do not fit.
    """
    if not recipe.evicts or not layers:
        return (n,) * len(layers)
    banded = {
        i: _checked_tokens(recipe, budget, n, "bands")
        for i, layer in enumerate(layers)
        for first, last, budget in recipe.bands
        if first <= layer.index <= last
    }
    rest = [layer for i, layer in enumerate(layers) if i not in banded]
    if isinstance(recipe.budget, str):
        taken = sum(layers[i].kv_heads * layers[i].token_bytes * tokens for i, tokens in banded.items())
        shared = iter(_fit_bytes(recipe, n, rest, budget_bytes(recipe.budget), taken))
    else:
        assert recipe.budget is not None
        mean = _checked_tokens(recipe, recipe.budget, n, "budget") if rest else n
        shared = iter(_spread(recipe, n, mean, len(rest)))
    return tuple(banded[i] if i in banded else next(shared) for i in range(len(layers)))


def pyramid(mean: int | Fraction, layers: int, beta: int, *, least: int, most: int) -> tuple[int, ...]:
    """A linear ramp over `layers` layers, first highest, in whole tokens: arXiv 2406.02069 with an exact sum.

    The last layer has mean / beta, the first what keeps the mean, both moved inwards as far as `least` and `most`
    ask (least <= mean <= most). Rounded by largest remainder, earlier layers first among equals: the sum is that of
    the real-valued ramp (`layers` * mean, rounded half up where it is no whole number).
    """
    assert least <= mean <= most and layers > 0 and beta > 0
    exact = Fraction(mean)
    low = min(exact, max(exact / beta, Fraction(least), 2 * exact - most))
    step = 2 * (exact - low) / (layers - 1) if layers > 1 else Fraction(0)
    high = 2 * exact - low if layers > 1 else exact
    ramp = [high - step * i for i in range(layers)]
    floors = [value.numerator // value.denominator for value in ramp]
    missing = int(exact * layers + Fraction(1, 2)) - sum(floors)
    by_remainder = sorted(range(layers), key=lambda i: floors[i] - ramp[i])  # stable: earlier layers first
    gets_one = set(by_remainder[:missing])
    return tuple(floors[i] + (i in gets_one) for i in range(layers))


def _checked_tokens(recipe: Recipe, budget: int | float, n: int, name: str) -> int:
    """A token or fraction budget of this prompt. RecipeError where tokens cannot hold what is always kept."""
    if isinstance(budget, int):
        check_protected_fit(recipe, n, budget, name)
    return recipe.tokens_of(budget, n)


def _spread(recipe: Recipe, n: int, mean: int, layers: int) -> tuple[int, ...]:
    """Budgets of `layers` layers that keep `mean` tokens per head on average."""
    if recipe.layers == "uniform" or mean >= n or not layers:
        return (mean,) * layers
    # The ramp is of what is chosen by score: every layer has the window and tail besides.
    always = min(recipe.tail + recipe.kept_window, mean)
    least = recipe.least_tokens(n) - always
    ramp = pyramid(mean - always, layers, recipe.beta, least=least, most=n - always)
    return tuple(always + tokens for tokens in ramp)


def _fit_bytes(
    recipe: Recipe, n: int, layers: Sequence[LayerShape], limit: int, taken: int
) -> tuple[int, ...]:
    """The largest budgets of `layers` whose survivors, with `taken` bytes of other layers, take at most `limit`."""
    costs = [layer.kv_heads * layer.token_bytes for layer in layers]
    sum_tells = len(set(costs)) <= 1 or recipe.layers == "uniform"

    def plan(mean: int) -> tuple[int, ...]:
        return _spread(recipe, n, mean, len(layers))

    def fits(mean: int) -> bool:
        if sum_tells:  # whatever the shape, the budgets sum to `mean` per layer
            return taken + sum(costs) * mean <= limit
        return taken + sum(cost * tokens for cost, tokens in zip(costs, plan(mean), strict=True)) <= limit

    least = recipe.least_tokens(n)
    if not fits(least):
        raise RecipeError(
            "budget",
            f"{limit} bytes cannot hold {' + '.join(protected_parts(recipe)) or 'one token'} in every layer",
            f"at least {taken + least * sum(costs)} bytes for this prompt and model",
        )
    return plan(_largest(fits, least, n))


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` (which fits) to `high` that fits, where what fits is all below some number."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

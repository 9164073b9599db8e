"""What prefill owes one prompt beside its KV, decided before it begins: budgets, queries to show, tokens to compute."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.model import LayerSpec, ModelSpec
from engine.request import GenerationRequest
from engine.support import refuse_recipe
from engine.watch import QueryWatch
from policies import get_policy
from policies.budget import LayerShape, plan_budgets
from policies.decoding import DecodeRule, get_rule
from policies.policy import Needs, ObservedLayer, Policy
from policies.recipe import Recipe, RecipeError


@dataclass(frozen=True)
class PromptPlan:
    """One prompt of `tokens` tokens under one recipe.

    `scored`: the KV caches that the policy acts on, `budgets` what each of them keeps per kv head (the mean over its
    heads, where heads share). `report`: measure kept attention mass as well.
    """

    recipe: Recipe
    policy: Policy
    rule: DecodeRule
    tokens: int
    scored: tuple[int, ...]
    budgets: tuple[int, ...]
    report: bool = False

    def cut(self, place: int) -> bool:
        """Whether the policy has to choose in scored cache number `place`."""
        return self.budgets[place] < self.tokens

    @property
    def whole(self) -> bool:
        """Whether every token stays in every cache, so that nothing is scored."""
        return all(budget >= self.tokens for budget in self.budgets)

    @property
    def reported_queries(self) -> int:
        """Last queries whose attention the kept mass is measured by."""
        return min(self.tokens, self.recipe.window + self.recipe.tail)

    @property
    def noted(self) -> bool:
        """Whether the decode rule starts from the prompt's attention, evicted from or whole."""
        return self.rule.prompt_all_queries or self.rule.prompt_queries(self.tokens) > 0

    def queries(self, place: int) -> int:
        """How many last queries of scored cache number `place` somebody reads."""
        wanted = self.rule.prompt_queries(self.tokens)
        if self.cut(place):
            wanted = max(wanted, self.policy.queries_wanted(self.tokens))
            if self.report:
                wanted = max(wanted, self.reported_queries)
        return min(wanted, self.tokens)

    def observed(self, place: int) -> bool:
        """Whether the policy has to meet all queries of scored cache number `place`."""
        return self.policy.needs is Needs.ALL_QUERIES and (self.cut(place) or self.rule.prompt_all_queries)

    @property
    def must_compute(self) -> int:
        """How many last tokens are computed even if their KV is known: the last one, and those whose queries are read.

        Cached tokens issue no queries.
        """
        places = range(len(self.scored))
        if any(self.observed(place) for place in places):
            return self.tokens
        return max([1, *(self.queries(place) for place in places)])


def plan_prompt(spec: ModelSpec, request: GenerationRequest) -> PromptPlan:
    """The plan of a request's prompt. `InvalidRequest` where its recipe cannot be met by this model and prompt."""
    recipe, tokens = request.recipe, len(request.prompt)
    refuse_recipe(spec, recipe)
    scored = tuple(index for index, layer in enumerate(spec.layers) if layer.window is None)
    shapes = [
        LayerShape(index, layer.kv_heads, 2 * layer.head_dim * spec.dtype.itemsize)
        for index, layer in ((index, spec.layers[index]) for index in scored)
    ]
    try:
        budgets = plan_budgets(recipe, tokens, shapes)
    except RecipeError as error:
        raise InvalidRequest(
            f"kv.{error.field}: {error.problem}; valid: {error.valid}", f"kv.{error.field}"
        ) from error
    return PromptPlan(recipe, get_policy(recipe), get_rule(recipe), tokens, scored, budgets, request.report)


def open_watches(spec: ModelSpec, plan: PromptPlan) -> dict[int, QueryWatch]:
    """By cache: a watch for every one whose queries somebody reads."""
    watches = {}
    for place, index in enumerate(plan.scored):
        layer, window = spec.layers[index], plan.queries(place)
        observer = None
        if plan.observed(place):
            observer = plan.policy.observer(_observed_layer(layer, plan.tokens))
        if window or observer is not None:
            watches[index] = QueryWatch(layer, plan.tokens, window, spec.dtype, observer)
    return watches


def _observed_layer(layer: LayerSpec, tokens: int) -> ObservedLayer:
    return ObservedLayer(
        kv_heads=layer.kv_heads,
        query_heads=layer.scored_heads,
        head_dim=layer.head_dim,
        tokens=tokens,
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=layer.sinks,
        rotation=layer.rotation,
    )

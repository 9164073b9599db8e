"""A stupid simulation of a sequence that forgets: every key ever computed in a dictionary, attention in float64.

It shares the rule and the model's layers with the engine, and nothing else: no pages, slots, holes or turned keys. A
token that counts by its slot is turned there from scratch in every step.
"""

from __future__ import annotations

import torch

from engine.eviction import scored_layers
from policies.decoding import LayerKeys, get_rule


class SimulatedRow:
    """Attention port of one sequence; `step` feeds it a token and lets the rule evict."""

    def __init__(self, model, done):
        self.model, self.spec = model, model.spec
        meta, recipe = done.layout.meta, done.job.request.recipe
        self.rule = get_rule(recipe)
        self.slot_mode = recipe.positions == "slot"
        self.layers = scored_layers(model.spec).tolist()
        space = done.job.workspace
        self.keys = [[rows[:, p] for p in range(space.tokens)] for rows in space.keys]
        self.values = [[rows[:, p] for p in range(space.tokens)] for rows in space.values]
        lengths = meta.counts[self.layers]
        positions = torch.full((*lengths.shape, int(lengths.max())), -1, dtype=torch.int32)
        for (layer, head), listed in meta.positions.items():
            if layer in self.layers:
                positions[self.layers.index(layer), head, : len(listed)] = torch.from_numpy(listed.copy())
        self.state = self.rule.open(positions, lengths, meta.prompt_tokens, meta.arrays)
        keys = self._layer_keys() if self.rule.wants_keys(self.state) else None
        self.state.apply(self.rule.settle(self.state, keys))

    def step(self, token):
        """Logits [vocab] of one more token."""
        state, rule = self.state, self.rule
        self.position = state.position + 1
        shape = (*state.positions.shape[:2], state.slots)
        self.weights = {place: [] for place in range(len(self.layers))}
        self.queries = {place: [] for place in range(len(self.layers))}
        logits = self.model.forward([token], [self.position], self, [0])[0]
        if rule.query_window:
            for place, parts in self.queries.items():
                heads = self.spec.layers[self.layers[place]].kv_heads
                grouped = torch.cat([q.unflatten(0, (heads, -1)) for q in parts], 1)
                rule.keep_query(state, place, grouped.flatten(0, 1))
        slots = [[self._slots(place, head) for head in range(shape[1])] for place in range(shape[0])]
        state.advance()
        if rule.reduce:
            attention = torch.full(shape, float("nan"))
            for place, parts in self.weights.items():
                for head in range(self.spec.layers[self.layers[place]].kv_heads):
                    group = torch.cat([rows[head] for rows in parts])
                    found = group.mean(0) if rule.reduce == 1 else group.amax(0)
                    attention[place, head, slots[place][head]] = found.float()
            rule.observe(state, attention)
        keys = self._layer_keys() if rule.wants_keys(state) else None
        state.apply(rule.evict(state, keys))
        return logits

    def attend(self, call, query, key, value):
        layer = call.layer
        if call.stored:
            self.keys[layer].append(key[:, 0])
            self.values[layer].append(value[:, 0])
        spec = self.spec.layers[layer]
        group = query.unflatten(0, (spec.kv_heads, -1))[:, :, 0]
        if layer in self.layers:
            self.queries[self.layers.index(layer)].append(query[:, 0])
        out, weights = [], []
        for head in range(spec.kv_heads):
            rows = self._held(layer, head)
            k = torch.stack([self.keys[layer][p][head] for p in rows])
            v = torch.stack([self.values[layer][p][head] for p in rows])
            q = group[head]
            if self.slot_mode and layer in self.layers:
                rank = torch.tensor(rows).argsort().argsort()
                k = spec.rotation.rotate(k, rank - torch.tensor(rows))
                q = spec.rotation.rotate(q, torch.full((len(q),), len(rows) - 1 - self.position))
            logits = q.double() @ k.double().T * call.scale
            if call.softcap:
                logits = torch.tanh(logits / call.softcap) * call.softcap
            if call.sinks is not None:
                sinks = call.sinks.view(spec.kv_heads, -1)[head].double()
                logits = torch.cat([logits, sinks.unsqueeze(-1)], -1)
            share = torch.softmax(logits, -1)[:, : len(rows)]
            weights.append(share)
            out.append((share @ v.double()).float())
        if layer in self.layers:
            self.weights[self.layers.index(layer)].append(weights)
        return torch.cat(out).unsqueeze(0)

    def held(self):
        """By (scored layer, head), the positions that are cached."""
        found = {}
        for place, layer in enumerate(self.layers):
            for head in range(self.spec.layers[layer].kv_heads):
                rows = self.state.positions[place, head]
                found[layer, head] = rows[rows >= 0].tolist()
        return found

    def _held(self, layer, head):
        """Positions that the token being decoded attends to, its own last."""
        window = self.spec.layers[layer].window
        if window is not None:
            return list(range(max(0, self.position - window + 1), self.position + 1))
        rows = self.state.positions[self.layers.index(layer), head]
        return [*rows[rows >= 0].tolist(), self.position]

    def _slots(self, place, head):
        rows = self.state.positions[place, head]
        return [*torch.nonzero(rows >= 0).flatten().tolist(), int(self.state.write[place, head])]

    def _layer_keys(self):
        found = []
        for place, layer in enumerate(self.layers):
            spec = self.spec.layers[layer]
            keys = torch.full((spec.kv_heads, self.state.slots, spec.head_dim), float("nan"))
            for head in range(spec.kv_heads):
                for slot, position in enumerate(self.state.positions[place, head].tolist()):
                    if position >= 0:
                        keys[head, slot] = self.keys[layer][position][head]
            found.append(LayerKeys(keys, spec.scale, spec.softcap, spec.sinks))
        return found

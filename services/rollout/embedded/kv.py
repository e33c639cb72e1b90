"""Keys and values of everything in flight: each prompt once for all its samples, each sample's answer in a row.

Called by the decoder. Prompts lie in length classes (padded to a power of two), so that the prompts of a class are
attended to in one matmul; answers lie in one block of rows, kept dense, which grows by doubling.
Letters: S samples being decoded, G groups, W most samples of a group, L layers, K key/value heads, R query heads a
key/value head, D size of a head, P prompt tokens, A answer tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.rollout.embedded.sequence import Group, Sequence

SMALLEST_CLASS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's K/V look like."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype


class Block:
    """Keys and values of up to some number of rows and tokens: two tensors [L, rows, K, tokens, D], zero where unused.

    They are used in their whole width, since matmuls on slices of it are two to five times slower on a CPU.
    Zero and not uninitialised: a masked token has weight 0, and 0 × NaN would be NaN.
    """

    def __init__(self, shape: Shape, rows: int = 0, tokens: int = 0) -> None:
        self._shape = shape
        size = (shape.layers, rows, shape.heads, tokens, shape.head_size)
        self.keys = torch.zeros(size, dtype=shape.dtype)
        self.values = torch.zeros(size, dtype=shape.dtype)

    @property
    def tokens(self) -> int:
        """Width."""
        return self.keys.shape[3]

    def reserve(self, rows: int, tokens: int, spare_tokens: int = 0) -> None:
        """Have room for so many rows and tokens. Rows double where they grow; tokens get `spare_tokens` more."""
        _, old_rows, _, old_tokens, _ = self.keys.shape
        if rows <= old_rows and tokens <= old_tokens:
            return
        new_rows = old_rows if rows <= old_rows else max(rows, 2 * old_rows)
        new_tokens = old_tokens if tokens <= old_tokens else -(-(tokens + spare_tokens) // 8) * 8
        larger = Block(self._shape, new_rows, new_tokens)
        larger.keys[:, :old_rows, :, :old_tokens] = self.keys
        larger.values[:, :old_rows, :, :old_tokens] = self.values
        self.keys, self.values = larger.keys, larger.values

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a row over another row."""
        self.keys[:, target, :, :tokens] = self.keys[:, source, :, :tokens]
        self.values[:, target, :, :tokens] = self.values[:, source, :, :tokens]


class PromptClass:
    """The stored prompts of one length class."""

    def __init__(self, shape: Shape) -> None:
        self.block = Block(shape)
        self.groups: list[Group] = []

    def add(self, group: Group) -> None:
        """Give a group the next slot."""
        group.slot = len(self.groups)
        self.groups.append(group)
        self.block.reserve(len(self.groups), len(group.prompt))

    def remove(self, group: Group) -> None:
        """Free a group's slot; the last group moves there."""
        last = self.groups.pop()
        if last is not group:
            self.block.move(last.slot, group.slot, len(last.prompt))
            last.slot = group.slot
            self.groups[group.slot] = last


class KVCache:
    """All K/V of the engine. `rows` are the samples being decoded, in the order of the block's rows."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._classes: dict[int, PromptClass] = {}
        self.rows: list[Sequence] = []
        self.answers = Block(shape)
        self._layout: Layout | None = None

    def add_prompt(self, group: Group) -> None:
        """Make room for a group's prompt."""
        group.length_class = max(SMALLEST_CLASS, 1 << (len(group.prompt) - 1).bit_length())
        if group.length_class not in self._classes:
            self._classes[group.length_class] = PromptClass(self._shape)
        self._classes[group.length_class].add(group)
        self._layout = None

    def store_prompt(self, group: Group, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep one layer of a prompt: keys, values [K, P, D]."""
        block = self._classes[group.length_class].block
        block.keys[layer, group.slot, :, : keys.shape[1]] = keys
        block.values[layer, group.slot, :, : keys.shape[1]] = values

    def remove_prompt(self, group: Group) -> None:
        """Let a prompt go; memory of a class goes with its last prompt."""
        stored = self._classes[group.length_class]
        stored.remove(group)
        if not stored.groups:
            del self._classes[group.length_class]
        self._layout = None

    def add_row(self, sequence: Sequence) -> None:
        """A sample is decoded from now on, in a row after the others."""
        sequence.group.live += 1
        self.rows.append(sequence)
        self._layout = None

    def remove_row(self, index: int) -> None:
        """A sample has ended: the last row takes its place, and its prompt goes with the last sample of the group."""
        sequence, last = self.rows[index], self.rows.pop()
        if last is not sequence:
            self.answers.move(len(self.rows), index, len(last.tokens))
            self.rows[index] = last
        sequence.group.live -= 1
        if sequence.group.live == 0:
            self.remove_prompt(sequence.group)
        if not self.rows:
            self.answers = Block(self._shape)
        self._layout = None

    def next_pass(self) -> AnswerPass:
        """The pass in which the last token of every row is read."""
        lengths = [len(row.tokens) for row in self.rows]
        self.answers.reserve(len(self.rows), max(lengths), spare_tokens=max(lengths) // 2)
        if self._layout is None:
            self._layout = Layout(list(self._classes.values()), self.rows)
        return AnswerPass(self.answers, self._layout, torch.tensor(lengths))


class Layout:
    """Which rows attend to which prompts. Valid until a row or a prompt comes or goes.

    classes: one a length class. home: [S] int64, where each row is among the rows of all classes, one after the other.
    """

    def __init__(self, stored: list[PromptClass], rows: list[Sequence]) -> None:
        indices: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            indices.setdefault(id(row.group), []).append(index)
        self.classes = [ClassLayout(each, [indices[id(group)] for group in each.groups]) for each in stored]
        order = torch.cat([each.rows for each in self.classes])
        self.home = torch.empty(len(rows), dtype=torch.long)
        self.home[order] = torch.arange(len(order))


class ClassLayout:
    """The rows of one length class, group by group.

    rows: [G*W] int64; a group with fewer than W samples repeats its last one, which then is computed twice with the
    same result. hidden: [G, P] bool, True after a prompt's end.
    """

    def __init__(self, stored: PromptClass, rows: list[list[int]]) -> None:
        self.groups, self.width = len(rows), max(map(len, rows))
        self.rows = torch.tensor([r for own in rows for r in own + own[-1:] * (self.width - len(own))])
        self.block = stored.block
        lengths = torch.tensor([len(group.prompt) for group in stored.groups])
        self.hidden = torch.arange(self.block.tokens) >= lengths[:, None]

    def gather(self, rows: Tensor) -> Tensor:
        """[S, K, R, X] by row -> [G, K, W*R, X] by group."""
        _, heads, queries, size = rows.shape
        grouped = rows.index_select(0, self.rows).view(self.groups, self.width, heads, queries, size)
        return grouped.transpose(1, 2).reshape(self.groups, heads, self.width * queries, size)

    def spread(self, grouped: Tensor) -> Tensor:
        """[G, K, W*R, X] by group -> [G*W, K, R, X], in the order of `rows`."""
        _, heads, _, size = grouped.shape
        split = grouped.view(self.groups, heads, self.width, -1, size).transpose(1, 2)
        return split.reshape(self.groups * self.width, heads, -1, size)


class AnswerPass:
    """Attention of one new token a row: to the group's prompt, one matmul for its samples, and to the row's own answer.

    lengths: [S] int64, tokens of each answer, the new one included.
    """

    def __init__(self, answers: Block, layout: Layout, lengths: Tensor) -> None:
        self._answers = answers
        self._rows = torch.arange(len(lengths))
        self._new = lengths - 1
        self._home = layout.home
        hidden = torch.arange(answers.tokens) >= lengths[:, None]
        self._classes = [(each, _mask(each, hidden)) for each in layout.classes]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """An `Attend` (attention.py); keeps the new token's K/V."""
        rows, heads, size = query.shape[2], key.shape[1], query.shape[3]
        keys, values = self._answers.keys[layer, :rows], self._answers.values[layer, :rows]
        keys[self._rows, :, self._new] = key[0].transpose(0, 1)
        values[self._rows, :, self._new] = value[0].transpose(0, 1)
        q = (query[0] * scale).view(heads, -1, rows, size).permute(2, 0, 1, 3).contiguous()
        scores = q @ keys.transpose(-1, -2)
        weights, outs = [], []
        for each, mask in self._classes:
            prompt_keys = each.block.keys[layer, : each.groups]
            both = torch.cat([each.gather(q) @ prompt_keys.transpose(-1, -2), each.gather(scores)], dim=-1)
            split = both.view(each.groups, heads, each.width, -1, both.shape[-1])
            both = (split + mask).softmax(-1).to(q.dtype).view(both.shape)
            width = each.block.tokens
            outs.append(each.spread(both[..., :width] @ each.block.values[layer, : each.groups]))
            weights.append(each.spread(both[..., width:].contiguous()))
        out = torch.cat(outs).index_select(0, self._home)
        return (out + torch.cat(weights).index_select(0, self._home) @ values).view(1, rows, -1, size)


def _mask(layout: ClassLayout, hidden: Tensor) -> Tensor:
    """[G, 1, W, 1, P+A] float32 for the rows of a class: 0 where a token may be attended to, -inf elsewhere.

    hidden: [S, A] bool, True after each answer's end.
    """
    answer = hidden[layout.rows].view(layout.groups, layout.width, -1)
    prompt = layout.hidden[:, None].expand(-1, layout.width, -1)
    both = torch.cat([prompt, answer], dim=-1)[:, None, :, None]
    return torch.zeros(both.shape).masked_fill_(both, float("-inf"))

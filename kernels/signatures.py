"""The C functions of the native library: argument types, in order, and what their status codes mean."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int32, c_int64, c_void_p

DECODE = [
    *(c_void_p, c_void_p, c_void_p, c_int64, c_int64),  # out, lse, q and its strides
    *(c_void_p, c_int64, c_int64, c_int, c_int),  # pool: pages, bytes per page, is bf16, head size
    *(c_void_p, c_int64, c_int64, c_int64),  # tables, strides, pages per head
    *(c_void_p, c_int64, c_void_p, c_int64, c_void_p),  # starts, lengths, rows
    *(c_int, c_int, c_int, c_int),  # sequences, batch, kv heads, query heads per kv head
    *(c_float, c_float, c_void_p),  # scale, softcap, sinks
    *(c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int),  # mass, its strides and slots, reduce, threads
]
APPEND = [
    *(c_void_p, c_int64, c_int64, c_int, c_int),  # pool
    *(c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p),  # tables, lengths, rows
    *(c_int, c_int, c_int),  # sequences, batch, kv heads
    *(c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64),  # k, v, strides
]
MOVE = [
    *(c_int, c_void_p, c_int64, c_int64, c_int, c_int),  # direction, pool
    *(c_void_p, c_int64, c_int, c_int64, c_int64),  # tables, heads, slots
    *(c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int),  # k, v, strides, threads
]
COPY_PAGE = [c_void_p, c_int64, c_int64, c_int64, c_int64]
COLUMNS = [
    *(c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64),  # out, q, k, strides
    *(c_void_p, c_int64, c_int64, c_int, c_int),  # lse, its strides, is bf16, head size
    *(c_int, c_int, c_int64, c_int64),  # kv heads, query heads per kv head, first position, queries
    *(c_float, c_float, c_int),  # scale, softcap, threads
]
MOVE_SLOTS = [
    *(c_void_p, c_int64, c_int64, c_int, c_int),  # pool
    *(c_void_p, c_int64, c_int64, c_int),  # tables, stride, pages per head, heads
    *(c_void_p, c_int64, c_int64, c_int),  # sources, stride, slots, threads
]
ADD_SEEN = [
    *(c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64),  # sums, seen, strides
    *(c_void_p, c_int64, c_int64, c_int64, c_int),  # lengths, layers, heads, slots, threads
]
LOWEST = [
    *(c_void_p, c_void_p, c_int64, c_int64),  # out, score and its strides
    *(c_void_p, c_void_p, c_void_p, c_void_p),  # positions, kept, lengths, recent
    *(
        c_int32,
        c_int32,
        c_int64,
        c_int64,
        c_int64,
        c_int64,
        c_int,
    ),  # now, seen, layers, heads, slots, longest, threads
]
HIGHEST = [
    *(c_void_p, c_void_p, c_void_p, c_void_p),  # out, values, positions, counts
    *(c_int64, c_int64, c_int),  # heads, slots, threads
]
CHECK_BLOCKS = [
    *(c_void_p, c_void_p, c_void_p, c_int64),  # addresses of sources, of targets or null, sizes, blocks
    *(c_void_p, c_void_p, c_void_p),  # keys, what was found, form
]
BLOCK_RUN = [
    *(
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
        c_int64,
        c_int64,
    ),  # slots, blocks, offset, heads, tokens, bytes per row
    *(c_void_p, c_int64, c_int64),  # checksums, the first and their stride
    *(c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64),  # k and v with their strides in bytes
]
COPY = [c_void_p, c_void_p, c_int64, c_int64]
ENCODE_BLOCKS = [
    *(c_void_p, c_void_p, c_int64),  # addresses of sources and targets, blocks
    *(c_int64, c_int64, c_int64),  # codec, bytes per number, tokens
    *(c_void_p, c_int64),  # table of layers, layers
    *(c_void_p, c_void_p, c_void_p),  # wanted checksums, those made, outcomes
]
DECODE_BLOCKS = [*ENCODE_BLOCKS[:8], c_void_p]
XXH3 = [c_void_p, c_int64]
STATUS = (
    "",
    "a row outside the tables",
    "a length or start outside the pages",
    "a page outside the pool",
    "an observed length outside the mass, or an unknown reduce code",
    "no memory",
)

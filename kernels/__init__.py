"""Numeric primitives of kvtide: ragged paged decode attention, page layout, scoring and selection.

Import the submodules (`kernels.ops`, `kernels.layout`, ...). This file stays empty on purpose: Hugging Face
`transformers` imports whatever is called `kernels` while it probes for its own optional package of that name.
"""

"""The peers that plansmith's cpu target is measured beside: one module an engine, and what they share.

A peer's module runs in two places. `python bench/peers.py` imports it for NAME, VARIANTS, `install`, `convert` and
`command`; the peer's own environment runs it (`python -m peer.<module>`, in `bench/`) to load a variant and serve
requests. So at its top level it imports the standard library and `.session` alone.
"""

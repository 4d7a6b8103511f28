"""``xlength bench``: every figure as a ratio against a named peer or a limit, measured in one run.

A topic is a module of this package with ``run(options) -> list[dict]``; a row has ``case``,
``ours``, ``peer``, ``ratio``, ``limit`` and ``note`` where they apply (seconds unless the name says
otherwise).
"""

TOPICS = ("orders", "plans", "packing", "streams", "resume", "tokenize", "vlm")

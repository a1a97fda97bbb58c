"""Presets: what a script does depends on its data set, and --tiny makes it a miniature for the tests."""

import dataclasses
from typing import Any


def filled(config: Any, presets: dict[str, dict[str, Any]]) -> Any:
    """`config` with its None fields taken from presets["tiny"] if `config.tiny`, else from presets[config.data].

    What the user gave on the command line stays. What a preset does not name, it takes from the first of them: that of the
    data set at hand. A field that neither names stays None.
    """
    chosen = next(iter(presets.values())) | presets.get(getattr(config, "data", ""), {})
    if config.tiny:
        chosen |= presets["tiny"]
    return dataclasses.replace(config, **{k: v for k, v in chosen.items() if getattr(config, k) is None})

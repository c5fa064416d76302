"""Which rows of an embedding are tokens, told by the tokenizer that belongs to it.

Owns the comparison of a tokenizer's ids with a model's rows. Refuses to own encoding (`data/tokenizer.py`).

Rows beyond the largest id are padding, added so that a table divides evenly: they are kept as they are, and never drawn.
Ids beyond the rows are another model's tokenizer, unless they are special tokens that nothing here can bring about, as the
placeholder of an image in a model that reads text only.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def valid_rows(files: Mapping[str, bytes], rows: int, source: Path) -> tuple[int | None, list[str]]:
    """Return how many of the rows are tokens, None when all are, and notices of what is left over on either side.

    Args:
        files: The model's tokenizer and generation files.
        rows: Rows of its embedding.
        source: The model, for messages.

    Raises:
        ValueError: There is no tokenizer, or it has ids beyond the rows that may be used.
    """
    where = source / "tokenizer.json" if source.is_dir() else source
    if "tokenizer.json" not in files:
        raise ValueError(
            f"{where} does not exist; a model needs its tokenizer in this format, so save it as a fast tokenizer next to the "
            "weights first"
        )
    try:
        tokenizer = json.loads(files["tokenizer.json"])
        added = {token["id"]: token for token in tokenizer.get("added_tokens") or []}
        vocab = tokenizer["model"]["vocab"]
        ids = {*(vocab.values() if isinstance(vocab, dict) else range(len(vocab))), *added}
        beyond = sorted(index for index in ids if index >= rows)
        count = 1 + max(ids.difference(beyond))
    except (ValueError, KeyError, TypeError) as err:
        raise ValueError(f"{where}: not a tokenizer ({type(err).__name__}: {err}); download it again") from err
    used = set(_used(files)) if beyond else set()
    if any(
        index not in added or not added[index].get("special") or {index, added[index]["content"]} & used for index in beyond
    ):
        raise ValueError(
            f"{where}: has the id {beyond[-1]}, but the model has {rows} rows (vocab_size); the two do not belong together, so "
            "take the tokenizer that the model was published with"
        )
    notices = []
    if beyond:
        names = ", ".join(added[index]["content"] for index in beyond)
        notices.append(f"{where}: the model has no rows for the special tokens {names}; no text and no template makes them")
    if count < rows:
        notices.append(f"the last {rows - count} rows of the embedding belong to no token: they are kept, and never drawn")
    return count if count < rows else None, notices


def _used(files: Mapping[str, bytes]) -> Iterator[int | str]:
    """Yield the ids that generation may need, and every special token that the settings or a template name."""
    settings: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
    for key in _NAMED:
        token = settings.get(key)
        yield token["content"] if isinstance(token, dict) else token or ""
    generation: dict[str, Any] = json.loads(files.get("generation_config.json", b"{}"))
    for key in _IDS:
        found = generation.get(key)
        yield from found if isinstance(found, list) else [] if found is None else [found]
    templates = [content.decode() for name, content in files.items() if name.startswith(("chat_template", "additional_"))]
    templates.append(json.dumps(settings.get("chat_template"), ensure_ascii=False))
    for token in json.loads(files["tokenizer.json"])["added_tokens"]:
        if any(token["content"] in template for template in templates):
            yield token["content"]

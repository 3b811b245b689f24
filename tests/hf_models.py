"""All model classes of transformers, tiny and with random weights: attn_implementation="tl_attention" beside "eager".

python tests/hf_models.py --out models.jsonl                   # one line per class; a second call goes on where the first ended
python tests/hf_models.py --out models.jsonl --table docs/transformers.md     # rewrite the table from the results
python tests/hf_models.py LlamaModel T5Model                   # print the results of some classes
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import re
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.masking_utils import eager_mask
from transformers.models.auto import configuration_auto, modeling_auto

from tl_attention.integrations import hf

LENGTH, TARGETS, VOCABULARY = 24, 12, 99
DOCUMENTS = 7, 11, 6
CLOSE = 1e-3  # relative to eager attention, both in fp32
MOST_PARAMETERS = 70_000_000
SECONDS = 90  # per class
MAPPINGS = "MODEL", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT"

# The first pattern that matches a name decides; a number that is smaller already stays
SIZES = [
    (r"(vocab_size|num_embeddings|vocabulary_size)(_.*)?$", VOCABULARY),
    (r"(num_)?(key_value_heads|kv_heads|key_value_head|multi_query_group_num)$", 2),
    (r".*(attention_heads|num_heads|n_heads?|head_count|nhead)$", 4),
    (r".*(num_hidden_layers|num_layers|n_layers?|_layers|num_blocks|depth)$", 2),
    (r"(head_dim|d_kv|qk_head_dim|v_head_dim|head_size|attention_head_dim|global_head_dim)$", 16),
    (r"qk_(rope|nope)_head_dim$", 8),
    (r"rotary_dim$", 16),
    (r"(n_group|topk_group|attn_layer_offset)$", 1),
    (r"attn_layer_period$", 2),
    (r".*(ffn_dim|intermediate_size|ffn_hidden_size|d_ff|d_inner|n_inner|mlp_dim|hidden_dim_ff|ff_dim|feedforward_dim)$", 64),
    (r"(hidden_size|d_model|n_embd|hidden_dim|embed_dim|dim|emb_dim|d_embed|model_dim|word_embed_proj_dim|embedding_size)$", 64),
    (r"(encoder_hidden_size|projection_dim|decoder_hidden_size|cross_attention_hidden_size)$", 64),
    (r".*(lora_rank|compress_dim)$", 16),
    (r".*(max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_seq_len|n_ctx)$", 128),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_experts_per_layer)$", 4),
    (r"(num_experts_per_tok|moe_topk|top_k_experts|moe_k|num_experts_per_token)$", 2),
    (r"(sliding_window|attention_chunk_size|attention_window|local_attention|window_size)$", 8),
    (r"(image_size|img_size)$", 32),
]  # fmt: skip


def classes() -> list[tuple[str, str]]:
    """All (model type, class name) of the mappings, each class once."""
    found: dict[str, str] = {}
    for mapping in MAPPINGS:
        for kind, names in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").items():
            for name in names if isinstance(names, (tuple, list)) else (names,):
                found.setdefault(name, kind)
    return [(kind, name) for name, kind in found.items()]


ALWAYS = SIZES[0], SIZES[3]  # vocabularies and layers, where smaller widths do not fit together


MISSING = {
    "vocab_size": VOCABULARY,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}


def _smaller(
    settings: dict[str, Any], sizes: Sequence[tuple[str, int]], sections: list[int] | None
) -> dict[str, Any]:
    """Settings of a config with small sizes; nested configs, too. sections: mrope_section where a model has one."""
    layers = {x for key, x in settings.items() if isinstance(x, int) and re.match(SIZES[3][0], key)}
    small: dict[str, Any] = {}
    for key, x in settings.items():
        if key in ("out_features", "out_indices", "stage_names", "per_layer_config"):
            continue  # follow from the number of layers
        if isinstance(x, dict) and key in ("rope_parameters", "rope_scaling"):
            small[key] = x | ({"mrope_section": sections} if sections else {})
            if "rope_theta" in x and x["rope_theta"] is None:
                small[key]["rope_theta"] = 1e4
        elif isinstance(x, dict):
            small[key] = _smaller(x, sizes, sections)
        elif x is None and sizes is SIZES:
            small[key] = MISSING.get(key)
        elif isinstance(x, bool) or x is None:
            small[key] = x
        elif isinstance(x, int):
            small[key] = min(x, next((size for pattern, size in sizes if re.match(pattern, key)), x))
            if key.endswith("_token_id") or key.endswith("_token_index"):
                small[key] = x if x < VOCABULARY else x % 4 + 1
        elif isinstance(x, list) and len(x) in layers and len(x) > 2:
            rare = list(dict.fromkeys(x)) if all(isinstance(y, str) for y in x) else x
            small[key] = [rare[0], rare[1] if len(rare) > 1 else rare[0]]
        elif isinstance(x, list) and key.endswith("token_id") and x and all(isinstance(y, int) for y in x):
            small[key] = [y if y < VOCABULARY else y % 4 + 1 for y in x]
        elif key in ("initializer_range", "init_std") and isinstance(x, float) and 0 < x < 0.15:
            small[key] = 0.15
        else:
            small[key] = x
    if sizes is SIZES and "qk_rope_head_dim" in small and isinstance(small.get("head_dim"), int):
        small["head_dim"] = small["qk_rope_head_dim"]
    return small


def tiny_config(
    kind: str, sizes: Sequence[tuple[str, int]] = SIZES, sections: list[int] | None = None
) -> Any:
    """Config of a model type with small sizes; raises where the type cannot be made so."""
    config_class = configuration_auto.CONFIG_MAPPING[kind]
    settings = config_class().to_dict()
    if not sizes:
        return config_class()
    wide = settings.get("hidden_size") if isinstance(settings.get("hidden_size"), int) else None
    small = _smaller(settings, sizes, sections)
    heads, groups = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
    if heads == groups and groups is not None:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if wide and settings.get("embedding_size") == wide:
        small["embedding_size"] = small["hidden_size"]
    for key in (
        "model_type",
        "transformers_version",
        "architectures",
        "_name_or_path",
        "torch_dtype",
        "dtype",
    ):
        small.pop(key, None)
    return config_class(**small)


def tiny_models(kind: str, name: str) -> Iterator[Any]:
    """Eager models of a class with random weights in eval mode, the smallest first; raises if there is none."""
    model_class = getattr(transformers, name)
    mrope = "mrope_section" in inspect.getsource(inspect.getmodule(model_class))
    faults = []
    tries: list[tuple[Sequence[tuple[str, int]], list[int] | None]] = [
        (SIZES, None),
        (ALWAYS, None),
        ((), None),
    ]
    if mrope:
        tries = [(SIZES, [2, 3, 3]), (SIZES, [1, 1, 2]), *tries]
    for sizes, sections in tries:
        try:
            config = tiny_config(kind, sizes, sections)
            if not isinstance(config, model_class.config_class):
                config = config.get_text_config()
            with torch.device("meta"):
                model = model_class._from_config(copy.deepcopy(config), attn_implementation="eager")
            size = sum(x.numel() for x in model.parameters())
            if size > MOST_PARAMETERS:
                raise ValueError(f"{size} parameters")
            torch.manual_seed(0)
            yield model_class._from_config(config, attn_implementation="eager").eval()
        except Exception as error:
            faults.append(error)
    raise faults[0] if faults else ValueError("no inputs fit")


def eager_model(kind: str, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """An eager model of a class and inputs that it takes."""
    fault = None
    models = tiny_models(kind, name)
    while True:
        try:
            model = next(models)
        except Exception as error:
            raise fault or error from None
        for given in inputs(model):
            try:
                _output(model, given)
                return model, given
            except Exception as error:
                fault = fault or error


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def inputs(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs to try on a model: tokens where it has some, and pixels or sound."""
    names, config = inspect.signature(model.forward).parameters, model.config
    generator = torch.Generator().manual_seed(1)
    main = model.main_input_name

    def tokens(length: int) -> torch.Tensor:
        ids = torch.randint(6, VOCABULARY - 9, (2, length), generator=generator)
        end = getattr(config.get_text_config(), "eos_token_id", None)
        if isinstance(end, int) and 0 <= end < VOCABULARY:
            ids[:, length // 2] = end  # no padding there: CLIP's pooling looks for it
        return ids

    more = {"decoder_input_ids": tokens(TARGETS)} if "decoder_input_ids" in names else {}
    if "bbox" in names:
        more["bbox"] = torch.randint(0, 20, (2, LENGTH, 4), generator=generator).cumsum(-1)
    text = {"input_ids": tokens(LENGTH)} if "input_ids" in names else {}
    if text:
        yield text | more
    vision = getattr(config, "vision_config", None)
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or 32
    size = size if isinstance(size, (list, tuple)) else (size, size)
    channels, frames = getattr(config, "num_channels", 3), getattr(config, "num_frames", None)
    for key in ("pixel_values", "pixel_values_videos"):
        if key not in names:
            continue
        for shape in ((channels, *size), (channels, 64, 64), (frames or 2, channels, *size)):
            yield text | more | {key: _random(2, *shape)}
    if main == "input_values":
        bins = getattr(config, "num_mel_bins", 80)
        for shape in ((3200,), (1, 3200), (LENGTH, bins)):
            yield more | {main: _random(2, *shape)}
    if main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 64)
        keys = (
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "hidden_size",
            "input_dim",
        )
        sizes = {x for key in keys if isinstance(x := getattr(config, key, None), int)}
        for bins in sorted(sizes | {80, 128}):
            for shape in ((bins, frames), (frames, bins)):
                yield more | {main: _random(2, *shape)}


def _output(model: Any, given: dict[str, torch.Tensor], **more: Any) -> torch.Tensor:
    """First float tensor of a model's result, or that of its last layer."""
    seed = torch.random.get_rng_state()
    torch.manual_seed(5)
    with torch.no_grad():
        result = model(**given, **more)
    torch.random.set_rng_state(seed)
    for key in ("logits", "last_hidden_state", "text_embeds", "pooler_output"):
        if isinstance(x := result.get(key) if hasattr(result, "get") else None, torch.Tensor):
            return x.float()
    values = result.values() if hasattr(result, "values") else result
    return next(x.float() for x in values if isinstance(x, torch.Tensor) and x.is_floating_point())


def padding(name: str) -> torch.Tensor:
    """Mask [2, LENGTH] of a case: full, left, right, holes; 0 for padding."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    if name in ("left", "holes"):
        mask[1, :5] = 0
    if name == "right":
        mask[1, -6:] = 0
    if name == "holes":
        mask[0, 9] = 0
    return mask


def cases(
    model: Any, given: dict[str, torch.Tensor]
) -> Iterator[tuple[str, dict[str, Any], torch.Tensor | None]]:
    """(name, inputs, rows to compare or None for all) of each case that a model has."""
    names = inspect.signature(model.forward).parameters
    yield "full", given, None
    if "input_ids" not in given or "attention_mask" not in names:
        return
    yield "one", {name: x[:1] for name, x in given.items()}, None
    for name in ("left", "right", "holes"):
        mask = padding(name)
        ids = given["input_ids"].masked_fill(
            mask == 0, 5
        )  # smaller than all tokens, as pooling looks for the largest
        yield (
            name,
            given | {"input_ids": ids, "attention_mask": mask},
            None if "decoder_input_ids" in given else mask.bool(),
        )


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    """Relative difference of two tensors; inf where shapes or NaN differ."""
    if x.shape != y.shape or not torch.equal(x.isnan(), y.isnan()):
        return float("inf")
    x, y = x.nan_to_num().double(), y.nan_to_num().double()
    return ((x - y).norm() / y.norm().clamp_min(1e-9)).item()


def _verdict(x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor | None) -> str:
    if rows is not None and x.shape[:2] == rows.shape == y.shape[:2]:
        x, y = x[rows], y[rows]
    distance = far(x, y)
    return "right" if distance < CLOSE else f"wrong {distance:.2g}"


def _refusal(error: Exception) -> str:
    """The word for an error: refused if it names what works, obscure otherwise."""
    text = str(error)
    refused = (
        isinstance(error, (NotImplementedError, ValueError, TypeError))
        and "expected" in text
        and "got" in text
    )
    return ("refused: " if refused else "obscure: ") + f"{type(error).__name__} {text[:300]}"


def _packed(model: Any, ours: Any, given: dict[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Results for documents in one row that position_ids tell apart, without a mask and beside a mask of ones: see PACKED."""
    names = inspect.signature(model.forward).parameters
    if "position_ids" not in names or set(given) != {"input_ids"}:
        return
    ids = given["input_ids"][:1]
    pieces = [torch.arange(n)[None] for n in DOCUMENTS]
    packed = {"input_ids": ids, "position_ids": torch.cat(pieces, 1)}
    try:
        each = zip(ids.split(DOCUMENTS, 1), pieces, strict=True)
        alone = torch.cat([_output(model, {"input_ids": x, "position_ids": at}) for x, at in each], 1)
        mixed = _output(model, packed)
    except Exception:
        return
    for name, more in (("packed", {}), ("packed beside ones", {"attention_mask": torch.ones_like(ids)})):
        try:
            found = _output(ours, packed | more)
        except Exception as error:
            yield name, _refusal(error)
            continue
        if far(found, alone) < CLOSE:
            yield name, "apart"
        elif far(found, mixed) < CLOSE:
            yield name, "as eager"
        else:
            ours.set_attn_implementation(DENSE)
            expected = _output(ours, packed | more)
            ours.set_attn_implementation(hf.NAME)
            distance = far(found, expected)
            yield name, "apart in attention" if distance < CLOSE else f"wrong {distance:.2g}"


DENSE = "dense_documents"


def dense_documents(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> Any:
    """Attention in plain PyTorch with a dense additive mask, within the documents that position_ids tell apart."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = options.get("scaling")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap := options.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    positions = options.get("position_ids")
    if positions is not None and scores.shape[-1] == scores.shape[-2] == positions.shape[-1]:
        document = (positions == positions.min()).cumsum(-1).reshape(-1)
        scores = scores.masked_fill(document[:, None] != document, float("-inf"))
    sinks = options.get("s_aux")
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


def _cached(model: Any, ours: Any, given: dict[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Results of a prefill and two steps with the default cache, and of generate(), from prompts with left padding."""
    if set(given) != {"input_ids"} or not getattr(model, "can_generate", lambda: False)():
        return
    ids, mask = given["input_ids"], padding("left")

    def steps(m: Any) -> torch.Tensor:
        with torch.no_grad():
            past, parts = None, []
            for begin, end in ((0, LENGTH - 4), (LENGTH - 4, LENGTH - 3), (LENGTH - 3, LENGTH - 2)):
                out = m(
                    input_ids=ids[:, begin:end],
                    attention_mask=mask[:, :end],
                    past_key_values=past,
                    use_cache=True,
                )
                past = out.past_key_values
                parts.append(out.logits.float())
        return torch.cat(parts, 1)[mask[:, : LENGTH - 2].bool()]

    def generated(m: Any) -> torch.Tensor:
        return m.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, do_sample=False).float()

    for name, run in (("cached", steps), ("generated", generated)):
        try:
            expected = run(model)
        except Exception:
            continue
        try:
            yield name, _verdict(run(ours), expected, None)
        except Exception as error:
            yield name, _refusal(error)


class Calls:
    """Count of calls of tl_attention's attention and of its mask function, and names of their other arguments."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.arguments: set[str] = set()

    def register(self) -> None:
        hf.register()
        known = set(inspect.signature(hf.attention_forward).parameters)

        def attend(*args: Any, **options: Any) -> Any:
            self.counts["attention"] += 1
            self.arguments |= {name for name, x in options.items() if name not in known and x is not None}
            return hf.attention_forward(*args, **options)

        def mask(*args: Any, **options: Any) -> Any:
            self.counts["mask"] += 1
            return hf.attention_mask(*args, **options)

        transformers.AttentionInterface.register(DENSE, dense_documents)
        transformers.AttentionMaskInterface.register(DENSE, eager_mask)
        transformers.AttentionInterface.register(hf.NAME, attend)
        transformers.AttentionMaskInterface.register(hf.NAME, mask)


def result(kind: str, name: str) -> dict[str, Any]:
    """Results of a class by case, or why there are none."""
    calls = Calls()
    calls.register()
    about = {"kind": kind, "class": name}
    try:
        eager, given = eager_model(kind, name)
        expected = _output(eager, given)
    except Exception as error:
        return about | {"skipped": f"{type(error).__name__} {str(error)[:200]}"}
    if far(_output(eager, given), expected) > 1e-6:
        return about | {"skipped": "random results"}
    try:
        ours = type(eager)._from_config(copy.deepcopy(eager.config), attn_implementation=hf.NAME).eval()
    except Exception as error:
        return about | {
            "cases": {"made": f"refused: by transformers, {type(error).__name__} {str(error)[:200]}"},
            "arguments": [],
        }
    ours.load_state_dict(eager.state_dict())
    found: dict[str, str] = {}
    for case, asked, rows in cases(eager, given):
        try:
            expected = _output(eager, asked)
        except Exception:
            continue
        try:
            found[case] = _verdict(_output(ours, asked), expected, rows)
        except Exception as error:
            found[case] = _refusal(error)
    found |= dict(_packed(eager, ours, given)) | dict(_cached(eager, ours, given))
    return about | {"cases": found, **calls.counts, "arguments": sorted(calls.arguments)}


def verdict(found: dict[str, Any]) -> str:
    """Worst word of a class: wrong, obscure, refused, right, or skipped; "own attention" if it never called tl_attention's."""
    if "skipped" in found:
        return "skipped"
    words = {text.split()[0].rstrip(":") for text in found["cases"].values()}
    for word in ("wrong", "obscure", "refused"):
        if word in words:
            return word
    return "right" if found.get("attention") else "own attention"


HEADINGS = {
    "right": "Right in each case that the class has",
    "refused": "Refused, with an error that names what works",
    "own attention": "Attention of their own, which transformers does not route through `attn_implementation`: right, without tl_attention",
    "obscure": "An error of another kind",
    "wrong": "Wrong",
}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown of the classes by verdict, and of the reason where they are refused."""
    by: dict[str, dict[str, list[str]]] = {}
    for found in results:
        word = verdict(found)
        reason = ""
        if word in ("refused", "obscure", "wrong"):
            reason = next(text for text in found["cases"].values() if text.startswith(word))
        by.setdefault(word, {}).setdefault(_reason(reason), []).append(found["class"])
    counts = {word: sum(map(len, by.get(word, {}).values())) for word in (*HEADINGS, "skipped")}
    tried = sum(counts.values()) - counts["skipped"]
    numbers = ", ".join(f"{counts[word]} {word}" for word in HEADINGS)
    text = [
        f"transformers {transformers.__version__}: {tried} classes tried, {numbers}; {counts['skipped']} could not be made tiny, or have"
        " inputs that the sweep does not make.",
        "",
        "| Result | Classes |",
        "|---|---|",
    ]
    for word, heading in HEADINGS.items():
        for reason, names in sorted(by.get(word, {}).items()):
            cell = f"{heading}: {reason}" if reason else heading
            text.append(f"| {cell} ({len(names)}) | {', '.join(sorted(names))} |")
    mixed = sorted(
        x["class"] for x in results if "as eager" in x.get("cases", {}).values() and verdict(x) == "right"
    )
    heading = "Of the right ones, documents see each other, as no `position_ids` reach the attention"
    text.append(f"| {heading} ({len(mixed)}) | {', '.join(mixed)} |")
    return "\n".join(text)


REASONS = {
    "computes with the mask itself": "the model computes with the mask itself",
    "by transformers": "transformers refuses other implementations than its own in this class",
    "says is_causal=True, got None": "a causal layer without a mask",
    "the lengths of query and key": "a mask for other lengths than those of query and key",
    "head_dim": "a head dim that tl_attention does not have, at least in the tiny model",
    "does not know this argument": "an argument that changes the result",
    "mask_mod": "a mask function with an operation that flex_attention does not have",
    "local_size": "a window without keys",
}


def _reason(text: str) -> str:
    """Reason of a refusal in a few words; the start of the error where it has none in REASONS."""
    return next((reason for part, reason in REASONS.items() if part in text), text[:100].replace("|", "/"))


def _write_table(page: Path, results: list[dict[str, Any]]) -> None:
    before, rest = page.read_text().split("<!-- models -->\n")
    after = rest.split("<!-- /models -->")[1]
    page.write_text(f"{before}<!-- models -->\n{table(results)}\n<!-- /models -->{after}")


def _timed(kind: str, name: str) -> dict[str, Any]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return result(kind, name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return {"kind": kind, "class": name, "skipped": f"{type(error).__name__} {str(error)[:200]}"}
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="classes; all if none")
    parser.add_argument("--out", type=Path, help="file of results, one line per class")
    parser.add_argument("--table", type=Path, help="page whose table is written from the results in --out")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    done = set()
    if options.out and options.out.exists():
        done = {json.loads(line)["class"] for line in options.out.read_text().splitlines()}
    for kind, name in classes():
        if name in done or (options.names and name not in options.names):
            continue
        line = json.dumps(_timed(kind, name))
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(line + "\n")
    if options.table:
        _write_table(options.table, [json.loads(line) for line in options.out.read_text().splitlines()])


if __name__ == "__main__":
    main()

"""Rules on what the engine will answer: contexts beyond the trained length, drafts, parsers, the cache, the version."""

import json
import re
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path
from typing import Any

from workers.agent.preflight.findings import Severity, WayOut
from workers.agent.preflight.rule import Fires, Rule
from workers.agent.preflight.situation import Situation, read_number

_SHORT_PROMPTS = {"interactive", "shared"}
"""Workload profiles whose prompts stay far below a model's trained length."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one family of models needs, a row of `needs.toml`."""

    names: tuple[str, ...]
    model_types: tuple[str, ...]
    vllm: str
    reasoning_parser: str
    tool_call_parser: str


def _read_needs() -> tuple[Need, ...]:
    rows: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "needs.toml").read_text(encoding="utf-8"))[
        "need"
    ]
    return tuple(Need(**row | {"names": tuple(row["names"]), "model_types": tuple(row["model_types"])}) for row in rows)


NEEDS = _read_needs()


def _find_need(situation: Situation) -> Need | None:
    """Returns the row for this model, by name or, where the name says nothing, by its config."""
    name = situation.line.model.rstrip("/").rsplit("/", 1)[-1].casefold()
    for need in NEEDS:
        if any(fnmatchcase(name, pattern) for pattern in need.names):
            return need
    kind = situation.shape.model_type
    return next((need for need in NEEDS if kind in need.model_types), None)


def _exceeds_positions(situation: Situation) -> Fires | None:
    asked = situation.line.value("--max-model-len")
    if asked in {None, "auto", "-1"}:
        return None
    context, shape = read_number(str(asked), "--max-model-len"), situation.shape
    native, reach = (situation.know(length, "the model's longest context") for length in (shape.native, shape.reach))
    if context <= reach:
        return None
    factor = float(ceil(context / native))
    stretched = {
        "rope_parameters": {
            **shape.rope,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": native,
        },
        "max_position_embeddings": int(native * factor),
    }
    overrides = json.dumps({"text_config": stretched} if shape.nested else stretched)
    return Fires(
        {"context": context, "reach": reach},
        (
            WayOut("stay within the model's length", {"--max-model-len": str(reach)}),
            WayOut(f"stretch it by static YaRN, factor {factor:g}", {"--hf-overrides": overrides}),
        ),
    )


def _stretches_short_prompts(situation: Situation) -> Fires | None:
    shape = situation.shape
    if shape.yarn is None or shape.native is None:
        return None
    if situation.profile not in _SHORT_PROMPTS and situation.context > shape.native:
        return None
    length = str(min(situation.context, shape.native))
    way = WayOut("take `rope_scaling` out of the model's config.json, or serve the unstretched build")
    if situation.line.find("--hf-overrides") is not None:
        way = WayOut("serve without YaRN", {"--max-model-len": length}, ("--hf-overrides",))
    return Fires({"factor": f"{shape.yarn:g}", "native": shape.native}, (way,))


def _drafts_beyond_heads(situation: Situation) -> Fires | None:
    tokens = situation.draft_tokens
    heads = situation.know(situation.shape.mtp_heads, "the number of MTP heads in the config") if tokens else 0
    return Fires({"tokens": tokens, "heads": heads}, (_draft(heads),)) if heads and tokens > heads else None


def _drafts_uneven(situation: Situation) -> Fires | None:
    """VLLM refuses a count above the heads that is not a multiple of them."""
    tokens = situation.draft_tokens
    heads = situation.know(situation.shape.mtp_heads, "the number of MTP heads in the config") if tokens else 0
    if not heads or tokens <= heads or tokens % heads == 0:
        return None
    return Fires({"tokens": tokens, "heads": heads}, (_draft(heads), _draft(tokens // heads * heads)))


def _drafts_without_heads(situation: Situation) -> Fires | None:
    if not situation.draft_tokens:
        return None
    heads = situation.know(situation.shape.mtp_heads, "the number of MTP heads in the config")
    return None if heads else Fires()


def _draft(tokens: int) -> WayOut:
    table = {"method": "mtp", "num_speculative_tokens": tokens}
    return WayOut(f"guess {tokens} in each step", {"--speculative-config": json.dumps(table)}, ("--spec-tokens",))


def _lacks_reasoning_parser(situation: Situation) -> Fires | None:
    need = _find_need(situation)
    given = situation.line.value("--reasoning-parser")
    if need is None or given == need.reasoning_parser:
        return None
    way = WayOut("set the parser that the model is made for", {"--reasoning-parser": need.reasoning_parser})
    return Fires({"needed": need.reasoning_parser, "given": given or "missing"}, (way,))


def _lacks_tool_parser(situation: Situation) -> Fires | None:
    need = _find_need(situation)
    given = situation.line.value("--tool-call-parser")
    choice = situation.line.is_on("--enable-auto-tool-choice")
    if need is None or (given == need.tool_call_parser and choice):
        return None
    flags = {"--enable-auto-tool-choice": None, "--tool-call-parser": need.tool_call_parser}
    return Fires({"needed": need.tool_call_parser}, (WayOut("let the engine parse tool calls", flags),))


def _forgets_prefixes(situation: Situation) -> Fires | None:
    return None if situation.prefix_caching else Fires()


def _hides_hits(situation: Situation) -> Fires | None:
    return None if situation.line.is_on("--enable-prompt-tokens-details") else Fires()


def _is_outdated(situation: Situation) -> Fires | None:
    need = _find_need(situation)
    if need is None:
        return None
    present = situation.know(situation.vllm_version, "the installed vLLM's version")
    return Fires({"needed": need.vllm, "present": present}) if _order(present) < _order(need.vllm) else None


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


RULES = (
    Rule(
        "context-above-native",
        Severity.ERROR,
        _exceeds_positions,
        "--max-model-len $context is above the $reach tokens that the model's config allows",
    ),
    Rule(
        "static-yarn-for-short-prompts",
        Severity.WARNING,
        _stretches_short_prompts,
        "static YaRN (factor $factor) stretches every position, also for prompts within the $native tokens that the "
        "model was trained on, and can make their answers worse",
    ),
    Rule(
        "mtp-more-tokens-than-heads",
        Severity.NOTE,
        _drafts_beyond_heads,
        "$tokens tokens are guessed in each step and the model has $heads MTP head(s), used again for the later ones: "
        "acceptance falls with each, so compare off and 1, 2, 3 tokens before keeping it",
    ),
    Rule(
        "mtp-tokens-uneven",
        Severity.ERROR,
        _drafts_uneven,
        "$tokens tokens to guess are no multiple of the model's $heads MTP heads, which vLLM refuses",
    ),
    Rule(
        "mtp-without-heads",
        Severity.ERROR,
        _drafts_without_heads,
        "multi-token prediction is asked for, and the model has no MTP head",
        (WayOut("serve without it", remove_flags=("--speculative-config", "--spec-method", "--spec-tokens")),),
    ),
    Rule(
        "reasoning-parser-missing",
        Severity.WARNING,
        _lacks_reasoning_parser,
        "the model needs --reasoning-parser $needed (now $given), or its thoughts arrive inside the answers",
    ),
    Rule(
        "tool-parser-missing",
        Severity.WARNING,
        _lacks_tool_parser,
        "the model needs --enable-auto-tool-choice with --tool-call-parser $needed, or its tool calls arrive as text",
    ),
    Rule(
        "prefix-caching-off",
        Severity.ERROR,
        _forgets_prefixes,
        "prefix caching is switched off: no prompt would ever be at home here, and the proxy holds such a worker out",
        (WayOut("switch it on", {"--enable-prefix-caching": None}),),
    ),
    Rule(
        "prompt-tokens-details-missing",
        Severity.WARNING,
        _hides_hits,
        "without --enable-prompt-tokens-details the engine does not report cached tokens, and the proxy cannot correct "
        "what it believes this worker to hold",
        (WayOut("let it report them", {"--enable-prompt-tokens-details": None}),),
    ),
    Rule(
        "vllm-too-old",
        Severity.ERROR,
        _is_outdated,
        "the model needs vLLM $needed or newer; installed is $present",
        (WayOut("update vLLM"),),
    ),
)

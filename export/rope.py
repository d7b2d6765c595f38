"""RoPE: inverse frequencies from theta, and what becomes of them by each kind of scaling. All of it
ends as tables and one factor, so that the engine knows none of these names."""

import math
from dataclasses import dataclass, replace

import numpy as np

from export.errors import ExportError
from export.families import Family
from export.settings import Settings

KINDS = ("full_attention", "sliding_attention")  # of layers, by layer_types
TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    about: str  # for people: theta and scaling
    tables: np.ndarray  # inverse frequencies, float64 [tables, dimensions that turn / 2]
    scale: float = 1.0  # on cosines and sines
    long: np.ndarray | None = None  # the tables where the context is longer than original
    original: int = 0


def frequencies(dims: int, theta: float) -> np.ndarray:
    """Inverse frequencies, float64 [dims/2], where RoPE turns so many dimensions of a head."""
    if not (math.isfinite(theta) and 1 <= theta <= 1e9):
        raise ExportError(f"config: RoPE theta {theta} is not in 1 to 1e9")
    return theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


def scale_llama3(
    base: np.ndarray, factor: float, low: float, high: float, original: float
) -> np.ndarray:
    """Wavelengths above original/low are stretched by factor, those below original/high are kept,
    and between the two the frequencies are blended."""
    if not (factor >= 1 and 0 < low < high and original > 0):
        raise ExportError(
            f"config: llama3 RoPE scaling with factor {factor}, low_freq_factor {low}, "
            f"high_freq_factor {high}, original context {original} makes no sense"
        )
    turns = original * base / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return keep * base + (1 - keep) * base / factor


def scale_yarn(
    base: np.ndarray,
    theta: float,
    factor: float,
    fast: float,
    slow: float,
    original: float,
    whole=True,
) -> np.ndarray:
    """Dimensions that turn more than `fast` times within the original context are kept, those that
    turn less than `slow` times are stretched by factor; a ramp over the dimensions lies between, by
    default from a whole one to a whole one (arXiv 2309.00071)."""
    dims = 2 * len(base)
    if not (factor >= 1 and 0 < slow <= fast < math.inf and original > 0 and theta > 1):
        raise ExportError(
            f"config: YaRN with factor {factor}, beta_fast {fast}, beta_slow {slow}, "
            f"original context {original}, theta {theta} makes no sense"
        )

    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(fast), dimension(slow)
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    last += 0.001 * (first == last)
    stretch = np.clip((np.arange(len(base)) - first) / (last - first), 0, 1)
    return stretch * base / factor + (1 - stretch) * base


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1


def longrope_scale(factor: float, original: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0


def _yarn(rope: Settings, base: np.ndarray, theta: float, context: int) -> Rope:
    original = rope.integer("original_max_position_embeddings", context)
    factor = rope.number_or("factor", context / original)
    fast, slow = rope.number_or("beta_fast", 0) or 32, rope.number_or("beta_slow", 0) or 1
    weights = [rope.number_or(key, 0) for key in ("mscale", "mscale_all_dim")]
    table = scale_yarn(base, theta, factor, fast, slow, original, rope.flag("truncate", True))
    scale = yarn_scale(factor)
    if all(weights):
        scale = yarn_scale(factor, weights[0]) / yarn_scale(factor, weights[1])
    return Rope(
        f"YaRN {factor:g} from {original}", table[None], rope.number_or("attention_factor", scale)
    )


def _factors(rope: Settings, key: str, count: int) -> np.ndarray:
    """What to divide each frequency by."""
    values = rope.values.get(key)
    fits = isinstance(values, list) and len(values) == count
    if not fits or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        for value in values
    ):
        raise rope.wrong(key, f"{count} finite numbers above 0")
    return np.array(values, np.float64)


def _longrope(rope: Settings, base: np.ndarray, context: int) -> Rope:
    original = rope.integer("original_max_position_embeddings", context)
    short, long = (_factors(rope, f"{kind}_factor", len(base)) for kind in ("short", "long"))
    scale = longrope_scale(rope.number_or("factor", context / original), original)
    return Rope(
        f"longrope, other frequencies for contexts above {original}",
        (base / short)[None],
        rope.number_or("attention_factor", scale),
        (base / long)[None],
        original,
    )


def _scaled(rope: Settings, base: np.ndarray, theta: float, context: int) -> Rope:
    """By the kind of scaling; about is what to add to the words on theta."""
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind == "su" or (kind == "yarn" and "short_factor" in rope.values):
        kind = "longrope"  # Phi-3's first names of it
    if kind == "default":
        return Rope("", base[None])
    if kind == "dynamic":  # it grows with the text, from the context on
        return Rope(f"dynamic scaling, none up to {context}", base[None])
    if kind == "linear":
        factor = rope.number("factor", None)
        if factor < 1:
            raise rope.wrong("factor", "at least 1")
        return Rope(f"linear scaling {factor:g}", base[None] / factor)
    if kind == "llama3":
        factor = rope.number("factor", None)
        low, high = (rope.number(f"{end}_freq_factor", None) for end in ("low", "high"))
        original = rope.number("original_max_position_embeddings", context)
        table = scale_llama3(base, factor, low, high, original)
        return Rope(f"llama3 scaling {factor:g}", table[None])
    if kind == "yarn":
        return _yarn(rope, base, theta, context)
    if kind == "longrope":
        return _longrope(rope, base, context)
    raise ExportError(
        f"config.json: RoPE scaling {kind!r} is not supported; known: {', '.join(TYPES)}"
    )


def _one(rope: Settings, family: Family, head_dim: int, context: int) -> Rope:
    """What one set of RoPE parameters says."""
    part = rope.number("partial_rotary_factor", 1.0)
    if not (0 < part <= 1 if family.partial_rope else part == 1):
        raise rope.wrong("partial_rotary_factor", "0 to 1" if family.partial_rope else "1")
    dims = int(head_dim * part)
    if dims % 2 and part < 1:
        raise rope.wrong("partial_rotary_factor", f"an even part of {head_dim} dimensions")
    theta = rope.number("rope_theta", None)
    scaled = _scaled(rope, frequencies(dims, theta), theta, context)
    about = f"theta {theta:g}"
    if dims < head_dim:
        about += f", {dims} of {head_dim} dimensions"
    return replace(scaled, about=f"{about}, {scaled.about}" if scaled.about else about)


def _together(sets: list[Rope]) -> Rope:
    """Sets of all layers as one: a file has one factor, and one context where tables change."""
    if len({rope.scale for rope in sets}) > 1 or len({rope.original for rope in sets}) > 1:
        raise ExportError("config.json: RoPE: kinds of layers with factors of their own on it")
    long = [rope.long for rope in sets if rope.long is not None]
    return Rope(
        "; in windows ".join(rope.about for rope in sets),
        np.concatenate([rope.tables for rope in sets]),
        sets[0].scale,
        np.concatenate(long) if long else None,
        sets[0].original,
    )


def _sets_by_kind(settings: Settings, key: str, sliding: list[bool]) -> list[dict]:
    """transformers writes sets of both kinds, also where the layers are all of one."""
    given, needed = settings.values[key], {KINDS[slides] for slides in sliding}
    names = " and ".join(kind for kind in KINDS if kind in needed)
    expected = f"one set of RoPE parameters for each kind of layer, {names}"
    if not isinstance(given, dict):
        raise settings.wrong(key, expected)
    if not needed <= given.keys() <= {*KINDS}:
        raise settings.wrong(key, expected, f"the keys {', '.join(sorted(given))}"[:100])
    if not all(isinstance(parameters, dict) for parameters in given.values()):
        raise settings.wrong(key, expected)
    return [given.get(kind, {}) for kind in KINDS]


def _check_scaling(settings: Settings, family: Family) -> None:
    """rope_scaling beside rope_parameters, to which some add it: transformers would take it alone,
    and lose theta, so that it may only say all that rope_parameters say."""
    added, whole = settings.values.get("rope_scaling"), settings.values["rope_parameters"]
    if family.local_rope and isinstance(whole, dict):
        whole = whole.get(KINDS[0])
    if added not in (None, {}, whole):
        raise settings.wrong("rope_scaling", "nothing beside rope_parameters, where it belongs")


def _sets(settings: Settings, family: Family, sliding: list[bool]) -> list[dict]:
    """One set of RoPE parameters for each table. rope_scaling, which came before rope_parameters,
    is never by kind of layer: of a Gemma 3 it is for layers without a window."""
    said = settings.values.get("rope_parameters") not in (None, {})
    key = "rope_parameters" if said else "rope_scaling"
    if said:
        _check_scaling(settings, family)
    if family.local_rope and key == "rope_parameters":
        return _sets_by_kind(settings, key, sliding)
    given = {} if settings.values.get(key) is None else settings.values[key]
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise settings.wrong(key, "one set of RoPE parameters, not by kind of layer")
    return [given, {}] if family.local_rope else [given]


def rope_from_hf(
    settings: Settings, family: Family, head_dim: int, context: int, sliding: list[bool]
) -> Rope:
    """Reads rope_parameters (transformers 5; by kind of layer, where these differ) or rope_theta
    and rope_scaling (before). sliding: which layers have a window. Tables: all layers', or first
    those of layers without a window."""
    values, where = settings.values, f"{settings.where}: RoPE"
    sets, found = _sets(settings, family, sliding), []
    original = "original_max_position_embeddings"
    outside = {original: values.get(original, family.defaults.get(original))}
    for key, parameters in zip(("rope_theta", "rope_local_base_freq"), sets, strict=False):
        theta = {"rope_theta": values.get(key, family.defaults[key])}
        part = {"partial_rotary_factor": values.get("partial_rotary_factor", 1.0)}
        told = theta | part | parameters | (outside if outside[original] is not None else {})
        rope = _one(Settings(told, where), family, head_dim, context)
        if key not in values and "rope_theta" not in parameters:
            about = f"{rope.about} (not in the config: the family's default)"
            rope = replace(rope, about=about)
        found.append(rope)
    return _together(found)

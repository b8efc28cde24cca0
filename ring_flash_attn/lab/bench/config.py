"""What the lab's benchmarks measure: options of the command line, and of a TOML file.

    [attention]                        # rfa lab bench attention --config FILE
    seqlen = [256, 1024]
    implementation = ["standard", "ours"]
    [model]                            # rfa lab bench model --config FILE
    size = ["small", "mine"]
    precision = "bf16"
    [sizes.mine]
    d_model = 512
    d_ff = 2048
    layers = 8
    heads = 8

Each key has the name of its option. The command line wins over the file, and the file over the
defaults. Importing it loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from ...bench.workload import BOTH, FORWARD, Workload, dtype_name

STANDARD, COMPILED, TILED, TRITON, OURS = IMPLEMENTATIONS = (
    "standard",  # step 3's three lines
    "compiled",  # the same under torch.compile
    "tiled",  # PyTorch, tile by tile: steps 5 and 6
    "triton",  # the course's kernels: steps 7 and 8
    "ours",  # what the library runs
)
STEP = "step"  # forward, backward and the optimizer
MODEL_PASSES = (FORWARD, BOTH, STEP)
FP32, TF32, BF16 = PRECISIONS = ("fp32", "tf32", "bf16")
_NEEDS = "needs Python 3.11 or later, which has tomllib; here, give the options themselves"


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, not {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A decoder-only Transformer, but for its vocabulary."""

    d_model: int
    d_ff: int
    layers: int
    heads: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _integer(name, value)
        if self.d_model % (2 * self.heads):
            raise ValueError(
                f"d_model {self.d_model} and heads {self.heads}: each head needs an even number "
                "of dimensions, which RoPE turns in pairs"
            )


SIZES = {
    "small": ModelSize(768, 3072, 12, 12),
    "medium": ModelSize(1024, 4096, 24, 16),
    "large": ModelSize(1280, 5120, 36, 20),
    "xl": ModelSize(1600, 6400, 48, 25),
    "2.7B": ModelSize(2560, 10240, 32, 32),
}


# From texts of the command line, or values of TOML.


def _parts(value: Any) -> Sequence[Any]:
    """`128,256` and `[128, 256]` and `128` are all the same."""
    if isinstance(value, str):
        return [each.strip() for each in value.split(",")]
    return value if isinstance(value, (list, tuple)) else [value]


def _integers(name: str, value: Any) -> tuple[int, ...]:
    found = []
    for each in _parts(value):
        is_digits = isinstance(each, str) and each.isdecimal()
        found.append(_integer(name, int(each) if is_digits else each))
    if not found:
        raise ValueError(f"{name} must be at least one number")
    return tuple(dict.fromkeys(found))


def _names(choices: Collection[str] | None = None) -> Callable[[str, Any], tuple[str, ...]]:
    def read(name: str, value: Any) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(map(str, _parts(value))))
        for each in found:
            if choices is not None and each not in choices:
                raise ValueError(f"unknown {name} {each!r}; choose one of {', '.join(choices)}")
        if not found:
            raise ValueError(f"{name} must be at least one name")
        return found

    return read


def _dtypes(name: str, value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(dtype_name, _parts(value))))


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value


def _device(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be cpu or cuda, not {value!r}")
    return value


def _path(name: str, value: Any) -> Path | None:
    if value is not None and not isinstance(value, (str, Path)):
        raise ValueError(f"{name} must be the name of a file, not {value!r}")
    return None if value is None else Path(value)


def _read_by(read: Callable[[str, Any], Any], default: Any) -> Any:
    return field(default=default, metadata={"read": read})


_A_FILE: Mapping[str, Any] = {"read": _path}


def _keys(kind: type[Any]) -> list[str]:
    """What can be set by an option, or in the file's table."""
    return [each.name for each in fields(kind) if "read" in each.metadata]


def _read(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of some fields, each as it should be; None stays where it is the default."""
    known = {each.name: each for each in fields(kind)}
    return {
        name: value
        if value is None and known[name].default is None
        else known[name].metadata["read"](name, value)
        for name, value in values.items()
    }


class _Config:
    """Reads each of its fields."""

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in _keys(type(self))}
        for name, value in _read(type(self), values).items():
            object.__setattr__(self, name, value)

    def settings(self) -> dict[str, Any]:
        """Plain values, for a file of results."""
        values = {name: getattr(self, name) for name in _keys(type(self))}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None and not isinstance(value, Path)
        }


@dataclass(frozen=True)
class AttentionConfig(_Config):
    """`rfa lab bench attention`: a single head of d_model dimensions."""

    d_model: tuple[int, ...] = _read_by(_integers, (16, 32, 64, 128))
    seqlen: tuple[int, ...] = _read_by(_integers, (256, 1024, 4096, 8192, 16384))
    batch: int = _read_by(_integer, 8)
    dtype: tuple[str, ...] = _read_by(_dtypes, ("float32",))
    causal: bool = _read_by(_flag, False)
    implementation: tuple[str, ...] = _read_by(_names(IMPLEMENTATIONS), IMPLEMENTATIONS)
    passes: int = _read_by(_integer, 100)
    seconds: int = _read_by(_integer, 10)
    device: str | None = _read_by(_device, None)
    json: Path | None = field(default=None, metadata=_A_FILE)

    def workloads(self) -> list[Workload]:
        """Every cell of the tables: lengths within dimensions within dtypes."""
        return [
            Workload(self.batch, seqlen, 1, 1, d, self.causal, dtype=dtype)
            for dtype, d, seqlen in product(self.dtype, self.d_model, self.seqlen)
        ]


@dataclass(frozen=True)
class ModelCase:
    """One cell of `rfa lab bench model`."""

    name: str
    size: ModelSize
    context: int
    batch: int
    vocab: int
    precision: str
    attention: str
    compile: bool
    passes: tuple[str, ...]

    def __str__(self) -> str:
        words = (
            self.name,
            f"context {self.context}",
            self.precision,
            f"{self.attention} attention",
        )
        return ", ".join((*words, *["compiled"] * self.compile))

    @property
    def file_name(self) -> str:
        """Of what is recorded of it, without its suffix."""
        words = (self.name, self.context, self.precision, self.attention, self.passes[-1])
        text = "-".join(map(str, (*words, *["compiled"] * self.compile)))
        return "".join(each if each.isalnum() or each in "-._" else "_" for each in text)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelCase:
        """What `to_dict` made, after JSON."""
        size, passes = ModelSize(**values["size"]), tuple(values["passes"])
        return cls(**{**values, "size": size, "passes": passes})


@dataclass(frozen=True)
class ModelConfig(_Config):
    """`rfa lab bench model`."""

    size: tuple[str, ...] | None = _read_by(_names(), None)  # all of SIZES
    d_model: int | None = _read_by(_integer, None)  # these four change every size
    d_ff: int | None = _read_by(_integer, None)
    layers: int | None = _read_by(_integer, None)
    heads: int | None = _read_by(_integer, None)
    context: tuple[int, ...] = _read_by(_integers, (128, 256, 512, 1024))
    batch: int = _read_by(_integer, 4)
    vocab: int = _read_by(_integer, 10_000)
    precision: tuple[str, ...] = _read_by(_names(PRECISIONS), PRECISIONS)
    attention: tuple[str, ...] = _read_by(_names((STANDARD, OURS)), (STANDARD, OURS))
    passes: tuple[str, ...] = _read_by(_names(MODEL_PASSES), MODEL_PASSES)
    compile: bool = _read_by(_flag, False)
    repeats: int = _read_by(_integer, 10)
    device: str | None = _read_by(_device, None)
    profile: Path | None = field(default=None, metadata=_A_FILE)
    memory_snapshot: Path | None = field(default=None, metadata=_A_FILE)
    json: Path | None = field(default=None, metadata=_A_FILE)
    sizes: Mapping[str, ModelSize] = field(default_factory=dict)  # of the file

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chosen_sizes()

    def chosen_sizes(self) -> dict[str, ModelSize]:
        """By name, with the numbers that were given on their own."""
        known = {**SIZES, **self.sizes}
        given = {each.name: getattr(self, each.name) for each in fields(ModelSize)}
        changes = {name: value for name, value in given.items() if value is not None}
        names = self.size or (("small",) if changes else tuple(known))
        for name in names:
            if name not in known:
                raise ValueError(f"unknown size {name!r}; choose one of {', '.join(known)}")
        if len(changes) == len(given) and self.size is None:
            return {"own": ModelSize(**changes)}
        more = "".join(f" {name} {value}" for name, value in changes.items())
        return {name + more: replace(known[name], **changes) for name in names}

    def cases(self) -> Iterator[ModelCase]:
        """Every cell of the table."""
        order = tuple(each for each in MODEL_PASSES if each in self.passes)
        for (name, size), context, precision, attention in product(
            self.chosen_sizes().items(), self.context, self.precision, self.attention
        ):
            sizes = (name, size, context, self.batch, self.vocab)
            yield ModelCase(*sizes, precision, attention, self.compile, order)


Config = TypeVar("Config", AttentionConfig, ModelConfig)
_SECTIONS = {"attention": AttentionConfig, "model": ModelConfig}


def make_config(kind: type[Config], path: Path | None, given: Mapping[str, Any]) -> Config:
    """From the options that were `given` (None: not), then the file, then the defaults.

    ValueError for what makes no sense, with the file's name where it is to blame.
    """
    written = {} if path is None else _written(kind, path)
    options = {name: value for name, value in given.items() if value is not None}
    return kind(**{**written, **options})


def _written(kind: type[Config], path: Path) -> dict[str, Any]:
    """What the file says about one benchmark; all of the file is checked."""
    tables = _load(path)
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ValueError(f"{path}: {name} must be a table: [{name}]")
    _refuse(tables, [*_SECTIONS, "sizes"], f"{path}: unknown table {{!r}}")
    found: dict[type[Any], dict[str, Any]] = {}
    try:
        for section, each in _SECTIONS.items():
            table = {key.replace("-", "_"): it for key, it in tables.get(section, {}).items()}
            _refuse(table, _keys(each), f"unknown key {{!r}} in [{section}]")
            found[each] = _read(each, table)
        sizes = tables.get("sizes", {})
        found[ModelConfig]["sizes"] = {name: ModelSize(**size) for name, size in sizes.items()}
    except (TypeError, ValueError) as error:
        words = str(error).replace("ModelSize.__init__()", "[sizes]:")
        raise ValueError(f"{path}: {words}") from None
    return found[kind]


def _refuse(found: Mapping[str, Any], known: Sequence[str], message: str) -> None:
    for name in found:
        if name not in known:
            raise ValueError(f"{message.format(name)}; there are {', '.join(known)}")


def _load(path: Path) -> dict[str, Any]:
    try:
        tomllib: Any = import_module("tomllib")
    except ImportError:
        raise ValueError(f"{path}: a TOML file {_NEEDS}") from None
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # not text, or not TOML
        raise ValueError(f"{path} is not TOML: {error}") from None

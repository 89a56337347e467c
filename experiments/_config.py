"""Configuration of the programs: gin files and `--set` bindings.

We walk the statements of a gin file ourselves (gin's parser, gin's bindings) instead of calling
`gin.parse_config`: gin reports a mistake as several lines, without the closest known name, and dumps the whole
config for an undefined macro.
"""

import ast
import difflib
import importlib
import importlib.metadata
import inspect
import logging
import platform
import re
import tokenize
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import gin
from gin import config as gin_config
from gin import config_parser

from experiments._program import UserError as UserError
from experiments._program import checking as checking
from experiments._program import one_line as one_line
from experiments._program import run_program as run_program

_LOG = logging.getLogger(__name__)

CONFIG_DIR = Path(__file__).parent / "configs"
# Values with one of these first characters must be complete gin values; they are never taken as bare strings.
_GIN_VALUE_STARTS = tuple("'\"[({@%")
_LOWER_CASE_WORDS = {"true": "True", "false": "False", "none": "None", "null": "None"}
_SCALARS = (bool, int, float, str, type(None))
_LARGEST_FLOAT = 3.4e38
_DISTRIBUTIONS = (
    "jaxdit",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "gin-config",
)


@dataclass(slots=True)
class _Parsed:
    """What is known of the macros while files and bindings are read."""

    defined: set[str] = field(default_factory=set)
    # (macro, place) of each reference.
    referenced: list[tuple[str, str]] = field(default_factory=list)


def load_config(path: str | Path, bindings: Sequence[str] = ()) -> Path:
    """Makes gin's configuration the one of a file plus bindings, replacing whatever was configured before.

    `path` is looked for as given, then in the folder of shipped configs, both with and without `.gin`; an
    `include` is looked for beside the including file, then in the same way.

    A binding is `name.parameter=value` (or `macro=value` for a macro the file defines). The value is a Python
    literal, a gin reference (`@name`, `%macro`) or a container of them; anything else is a string as it
    stands, so `--set plan.bags=g1n2+g2n1` and `--set sample.size=32x48` need no quotes. A value that begins
    with a quote, a bracket, `@` or `%` has to be complete, and `true`, `false`, `none` are refused, since as
    strings they would all be true.

    Where a parameter is annotated with bool, int, float, str, None or a union of these, a literal of another
    type is refused (an int for a float is fine).

    Args:
      path: the config file.
      bindings: the `--set` texts, applied in order, after the file.

    Returns:
      The path of the file read.

    Raises:
      UserError: missing file, syntax error, unknown configurable or parameter (with the closest known and the
        place),
        wrong type, undefined macro, `%gin.REQUIRED` left standing.
    """
    resolved = find_config(path)
    gin.clear_config()
    parsed = _Parsed()
    _read_file(resolved, parsed, ())
    for binding in bindings:
        _apply_binding(binding, parsed)
    for name, place in parsed.referenced:
        if name not in parsed.defined and not _is_constant(name):
            raise UserError(f"{place}: macro %{name} is not defined{_closest(name, parsed.defined)}")
    try:
        gin.finalize()
    except ValueError as error:
        raise UserError(f"{resolved}: {one_line(str(error))}") from error
    return resolved


def check_used(bindings: Sequence[str]) -> None:
    """Refuses `--set` of what the run does not use, and warns of such lines in files.

    To be called once the configurables have been called.

    Args:
      bindings: the `--set` texts.

    Raises:
      UserError: naming the binding.
    """
    registry = gin_config._REGISTRY
    used = {selector for _, selector in gin_config._OPERATIVE_CONFIG}
    unused = {
        name for (_, name), values in gin_config._CONFIG.items() if values and name != "gin.macro"
    } - used
    for binding in bindings:
        selector = binding.partition("=")[0].strip().split("/")[-1].rpartition(".")[0]
        if unused & set(registry.matching_selectors(selector) if selector else ()):
            raise UserError(
                f"--set {binding}: nothing in this run uses {selector}. Refer to it where it is wanted, as in"
                f" train.data=@{selector}(), or leave it out."
            )
    if unused:
        names = ", ".join(sorted(registry.minimal_selector(name) for name in unused))
        _LOG.warning("the config sets parameters of %s, which nothing in this run uses", names)


def find_config(path: str | Path, beside: Path | None = None) -> Path:
    """The config file that `path` names, see `load_config`; `beside` is the folder tried before all others.

    Raises:
      UserError: if there is none; lists the shipped ones.
    """
    folders = [*([beside] if beside else []), Path(), CONFIG_DIR]
    for folder in folders:
        for candidate in (folder / path, folder / f"{path}.gin"):
            if candidate.is_file():
                return candidate
    known = sorted(file.name for file in CONFIG_DIR.glob("*.gin"))
    shipped = ", ".join(known) if known else "none"
    raise UserError(f"config file {str(path)!r} not found. Shipped configs: {shipped}.")


def _read_file(path: Path, parsed: _Parsed, including: tuple[Path, ...]) -> None:
    if path in including:
        raise UserError(f"{path}: includes itself, by way of {' -> '.join(map(str, including))}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    for place, statement in _statements(text, str(path), parsed):
        if isinstance(statement, config_parser.IncludeStatement):
            included = find_config(statement.filename, path.parent)
            _read_file(included, parsed, (*including, path))
        elif isinstance(statement, config_parser.ImportStatement):
            _import(statement.module, place)
        elif isinstance(statement, config_parser.BlockDeclaration):
            _configurable(statement.selector, place)
        else:
            _bind(statement, place, parsed)


class _Delegate(gin_config.ParserDelegate):
    """Resolves references as gin does, with our errors, and notes every macro mentioned."""

    def __init__(self, parsed: _Parsed, name: str):
        super().__init__()
        self._parsed, self._name = parsed, name
        self.parser: Any = None

    def configurable_reference(self, scoped_name: str, evaluate: bool) -> Any:
        _configurable(scoped_name.split("/")[-1], self.place())
        return super().configurable_reference(scoped_name, evaluate)

    def macro(self, name: str) -> Any:
        self._parsed.referenced.append((name, self.place()))
        return super().macro(name)

    def place(self) -> str:
        line = self.parser.current_token.start[0] if self.parser else 1
        return _place(self._name, line)


def _place(name: str, line: int) -> str:
    return name if name.startswith("--set ") else f"{name}:{line}"


def _statements(text: str, name: str, parsed: _Parsed) -> Iterator[tuple[str, Any]]:
    """The statements of a gin text with their places ("file:line")."""
    delegate = _Delegate(parsed, name)
    try:
        parser = config_parser.ConfigParser(StringIO(text), delegate)
        delegate.parser = parser
        while (statement := parser.parse_statement()) is not None:
            yield _place(name, statement.location.line_num), statement
    except SyntaxError as error:
        line = error.lineno or 1
        shown = text.splitlines()[line - 1].strip() if line <= len(text.splitlines()) else ""
        raise UserError(f"{_place(name, line)}: {one_line(error.msg)} in `{shown}`") from error
    except tokenize.TokenError as error:
        reason, (line, _) = error.args
        raise UserError(f"{_place(name, line)}: {reason}; is a bracket or quote left open?") from error
    except UserError as error:
        # The parser adds its own account of the place to what a delegate raises; ours is there already.
        raise UserError(str(error).split("\n")[0]) from None


def _bind(statement: Any, place: str, parsed: _Parsed) -> None:
    if not statement.arg_name:
        scope = f"{statement.scope}/" if statement.scope else ""
        name = scope + statement.selector
        parsed.defined.add(name)
        gin.bind_parameter((name, "gin.macro", "value"), statement.value)
        return
    wrapper = _configurable(statement.selector, place)
    _check_parameter(wrapper, statement, place)
    try:
        gin.bind_parameter((statement.scope, statement.selector, statement.arg_name), statement.value)
    except ValueError as error:
        raise UserError(f"{place}: {one_line(str(error))}") from error


def _import(module: str, place: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{place}: cannot import {module}: {one_line(str(error))}") from error


def _apply_binding(binding: str, parsed: _Parsed) -> None:
    place = f"--set {binding}"
    key, equals, value = (part.strip() for part in binding.partition("="))
    if not equals or not re.fullmatch(r"([A-Za-z_]\w*/)*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", key):
        raise UserError(f"{place}: a binding is name.parameter=value.")
    if "." not in key and key not in parsed.defined:
        known = {*parsed.defined, *_parameters_called(key)}
        raise UserError(f"{place}: {key!r} is neither name.parameter nor a macro{_closest(key, known)}")
    text = f"{key} = {_literal_text(value, place)}"
    for _, statement in _statements(text, place, parsed):
        _bind(statement, place, parsed)


def _literal_text(value: str, place: str) -> str:
    """`value` as gin would write it, see `load_config` for the rule."""
    if not value:
        raise UserError(f"{place}: no value. Write '' for an empty string.")
    if value in _LOWER_CASE_WORDS:
        raise UserError(
            f"{place}: write {_LOWER_CASE_WORDS[value]}, or {value!r} in quotes if a string is meant."
        )
    if value.startswith(_GIN_VALUE_STARTS):
        return value
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return repr(value)
    return value


def _parameters_called(name: str) -> set[str]:
    keys = set()
    for selector, configurable in gin_config._REGISTRY.items():
        if name in (_parameters(configurable.wrapped) or {}):
            keys.add(f"{gin_config._REGISTRY.minimal_selector(selector)}.{name}")
    return keys


def _configurable(selector: str, place: str) -> Callable[..., Any]:
    """The function or class registered under `selector`.

    gin has no public listing of its registry, which the closest name needs.
    """
    registry = gin_config._REGISTRY
    matches = registry.matching_selectors(selector)
    if len(matches) > 1:
        names = ", ".join(sorted(matches))
        raise UserError(f"{place}: {selector!r} is ambiguous: {names}. Give more of the name.")
    if not matches:
        known = {registry.minimal_selector(name) for name, _ in registry.items()}
        raise UserError(f"{place}: unknown configurable {selector!r}{_closest(selector, known)}")
    return registry[matches[0]].wrapped


def _check_parameter(wrapped: Callable[..., Any], statement: Any, place: str) -> None:
    parameters = _parameters(wrapped)
    name, key = statement.arg_name, f"{statement.selector}.{statement.arg_name}"
    if parameters is None:
        return
    if name not in parameters:
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return
        closest = _closest(key, {f"{statement.selector}.{known}" for known in parameters})
        raise UserError(f"{place}: {statement.selector!r} has no parameter {name!r}{closest}")
    allowed = _scalar_types(wrapped, name)
    value = statement.value
    if isinstance(value, float) and not abs(value) <= _LARGEST_FLOAT:
        raise UserError(f"{place}: {key} must be a finite number that float32 can hold; got {value!r}.")
    if isinstance(value, (*_SCALARS,)) and value is not None and _is_list(wrapped, name):
        raise UserError(f"{place}: {key} must be a list; got {value!r}.")
    if not allowed or not isinstance(value, (*_SCALARS, list, tuple, dict)):
        return
    fits = type(value) in allowed or (type(value) is int and float in allowed)
    if not fits:
        wanted = " or ".join("None" if t is type(None) else t.__name__ for t in allowed)
        raise UserError(f"{place}: {key} must be {wanted}; got {value!r}.")


def _parameters(wrapped: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """None for what is written in C and does not tell."""
    try:
        return inspect.signature(wrapped).parameters
    except ValueError:
        return None


def _annotated(wrapped: Callable[..., Any], name: str) -> tuple[Any, ...]:
    """What the annotation of a parameter allows, each member of a union by itself; empty if it cannot be told."""
    target = wrapped.__init__ if inspect.isclass(wrapped) else wrapped
    try:
        hint = typing.get_type_hints(target).get(name)
    except (NameError, TypeError):  # an annotation that only a type checker can resolve
        return ()
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _scalar_types(wrapped: Callable[..., Any], name: str) -> tuple[type, ...]:
    """The scalar types that the annotation of a parameter names; empty if it names anything else."""
    options = _annotated(wrapped, name)
    return options if all(option in _SCALARS for option in options) else ()


def _is_list(wrapped: Callable[..., Any], name: str) -> bool:
    """Whether a parameter is annotated as a sequence, and as nothing else but None."""
    options = [option for option in _annotated(wrapped, name) if option is not type(None)]
    kinds = [typing.get_origin(option) or option for option in options]
    return bool(kinds) and all(kind in (Sequence, list, tuple) for kind in kinds)


def _is_constant(name: str) -> bool:
    return bool(gin_config._CONSTANTS.matching_selectors(name))


def _closest(name: str, known: set[str]) -> str:
    """The end of a sentence: the nearest of the known names, or some of them if none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    # A forgotten or superfluous module part should not hide that the last parts agree.
    last_parts = {full.split(".")[-1]: full for full in sorted(known)}
    near = near or [
        last_parts[part] for part in difflib.get_close_matches(name.split(".")[-1], last_parts, n=1)
    ]
    if near:
        return f"; the closest known is {near[0]!r}."
    some = sorted(known)[:8]
    return f"; known: {', '.join(some)}{', ...' if len(known) > 8 else ''}." if some else "; none is known."


def operative_config() -> str:
    """Every parameter of every configurable called so far, with the value used, as a gin file."""
    return gin.operative_config_str()


def config_text() -> str:
    """The bindings as loaded, files and `--set` together, as a gin file."""
    return gin.config_str()


def versions() -> dict[str, str | None]:
    """Versions of Python, the platform and the packages a result depends on; None if not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found

"""The configuration of the programs: what loads, and the one line a user reads when it does not."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gin
import pytest

import experiments
from experiments import _config
from experiments._config import UserError, checking, load_config, run_program

PROGRAMS = Path(experiments.__file__).parent


@gin.configurable
def toy_run(
    steps: int = gin.REQUIRED,
    rate: float = 0.1,
    name: str | None = None,
    verbose: bool = False,
    sizes=(1, 2),
    optimizer=None,
):
    return {"steps": steps, "rate": rate, "name": name, "verbose": verbose, "sizes": sizes, "opt": optimizer}


@gin.configurable
@dataclass(frozen=True, slots=True)
class ToyOptimizer:
    weight_decay: float = 0.0
    beta: float = 0.9


@gin.configurable
def toy_open(**options):
    return options


@pytest.fixture(autouse=True)
def _clean_gin():
    yield
    gin.clear_config()


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="toy.gin"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write_file


def fails(path, *bindings):
    with pytest.raises(UserError) as caught:
        load_config(path, bindings)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_file_and_bindings_reach_the_call(write):
    path = write(
        "lr = 0.5\ntoy_run.steps = 3\ntoy_run.rate = %lr\ntoy_run.optimizer = @ToyOptimizer()\n"
        "ToyOptimizer:\n    weight_decay = 0.1\n"
    )
    assert load_config(path, ["toy_run.steps=7", "ToyOptimizer.beta=0.5"]) == path
    assert toy_run() == {
        "steps": 7,
        "rate": 0.5,
        "name": None,
        "verbose": False,
        "sizes": (1, 2),
        "opt": ToyOptimizer(0.1, 0.5),
    }
    assert "toy_run.steps = 7" in _config.operative_config()
    assert "toy_run.verbose = False" in _config.operative_config()
    assert "toy_run.verbose" not in _config.config_text()


def test_loading_replaces_what_was_loaded_before(write):
    load_config(write("toy_run.steps = 3\ntoy_run.rate = 9.0"))
    load_config(write("toy_run.steps = 4"))
    assert toy_run()["rate"] == 0.1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("g1n2+g2n1+g4n1", "g1n2+g2n1+g4n1"),
        ("32x48", "32x48"),
        ("/tmp/a b", "/tmp/a b"),
        ("'quoted'", "quoted"),
        ('"12"', "12"),
        ("1e-4", 1e-4),
        ("-3", -3),
        ("1_000", 1000),
        ("True", True),
        ("None", None),
        ("[1, 'a']", [1, "a"]),
        ("(1,)", (1,)),
        ("a=b", "a=b"),
        ("2026-01-02", "2026-01-02"),
        ("http://x/y#z", "http://x/y#z"),
    ],
)
def test_value_of_a_binding(write, value, expected):
    load_config(write("toy_run.steps = 1"), [f"toy_run.sizes={value}"])
    got = toy_run()["sizes"]
    assert got == expected
    assert type(got) is type(expected)


def test_references_scopes_and_macros_in_bindings(write):
    path = write("lr = 0.5\ntoy_run.rate = %lr\ntoy_run.steps = 1")
    load_config(path, ["toy_run.optimizer=@late/ToyOptimizer()", "late/ToyOptimizer.beta=0.25", "lr=0.75"])
    assert toy_run()["opt"].beta == 0.25
    assert toy_run()["rate"] == 0.75


def test_options_taken_by_keyword_are_open(write):
    load_config(write("toy_open.anything = 1"))
    assert toy_open() == {"anything": 1}


def test_include_is_found_beside_the_including_file(write, tmp_path):
    write("toy_run.steps = 3\ntoy_run.rate = 0.25", "base.gin")
    load_config(write("include 'base.gin'\ntoy_run.steps = 5"))
    assert toy_run()["steps"] == 5
    assert toy_run()["rate"] == 0.25


def test_errors_in_an_included_file_name_that_file(write):
    base = write("\ntoy_run.stepz = 3", "base.gin")
    assert f"{base}:2: 'toy_run' has no parameter 'stepz'" in fails(write("include 'base.gin'"))


def test_include_of_itself(write):
    assert "includes itself" in fails(write("include 'toy.gin'"))


def test_unknown_configurable_names_the_closest_and_the_place(write):
    path = write("# header\ntoy_runn.steps = 3")
    expected = f"{path}:2: unknown configurable 'toy_runn'; the closest known is 'toy_run'."
    assert fails(path) == expected


def test_unknown_configurable_in_a_block_and_in_a_reference(write):
    assert "unknown configurable 'ToyOptimiser'; the closest known is 'ToyOptimizer'" in fails(
        write("ToyOptimiser:\n    beta = 1.0")
    )
    text = fails(write("toy_run.steps = 1\ntoy_run.optimizer = @ToyOptimiser()"))
    assert ":2: unknown configurable 'ToyOptimiser'" in text


def test_unknown_parameter_names_the_closest_and_the_place(write):
    path = write("toy_run.steps = 3\nToyOptimizer:\n    beta = 1.0\n    weight_dekay = 0.1\n")
    assert fails(path) == (
        f"{path}:4: 'ToyOptimizer' has no parameter 'weight_dekay'; "
        "the closest known is 'ToyOptimizer.weight_decay'."
    )


def test_unknown_name_in_a_binding(write):
    path = write("toy_run.steps = 3")
    assert fails(path, "toy_run.stepps=3") == (
        "--set toy_run.stepps=3: 'toy_run' has no parameter 'stepps'; the closest known is 'toy_run.steps'."
    )
    assert "the closest known is 'toy_run'" in fails(path, "toyrun.steps=3")
    assert "'steps' is neither name.parameter nor a macro" in fails(path, "steps=500")


@pytest.mark.parametrize("binding", ["toy_run.steps", "=3", "toy run.steps=3", "toy_run.=3", "--steps=3"])
def test_malformed_binding(write, binding):
    assert fails(write("toy_run.steps = 3"), binding).startswith(f"--set {binding}: ")


def test_bindings_that_would_be_misread_are_refused(write):
    path = write("toy_run.steps = 3")
    assert "write True, or 'true' in quotes" in fails(path, "toy_run.verbose=true")
    assert "write None" in fails(path, "toy_run.name=none")
    assert "no value" in fails(path, "toy_run.name=")
    for value in ("[1, 2", "'open", "(1, 2))", "@", "%", "%nowhere", "@toy_run("):
        assert fails(path, f"toy_run.sizes={value}").startswith(f"--set toy_run.sizes={value}: ")


@pytest.mark.parametrize(
    ("binding", "wanted"),
    [
        ("toy_run.steps=abc", "must be int; got 'abc'"),
        ("toy_run.steps=1.5", "must be int; got 1.5"),
        ("toy_run.steps=True", "must be int; got True"),
        ("toy_run.rate=fast", "must be float; got 'fast'"),
        ("toy_run.name=3", "must be str or None; got 3"),
        ("toy_run.verbose=1", "must be bool; got 1"),
        ("ToyOptimizer.beta=[1]", "must be float; got [1]"),
    ],
)
def test_wrong_type(write, binding, wanted):
    assert wanted in fails(write("toy_run.steps = 3"), binding)


def test_an_integer_is_a_float(write):
    load_config(write("toy_run.steps = 3\ntoy_run.rate = 1"))
    assert toy_run()["rate"] == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("toy_run.steps = 3\ntoy_run.rate 4", 2),
        ("toy_run.sizes = [1,\n", 1),
        ("toy_run.steps = = 3", 1),
        ("toy_run.steps = three", 1),
        ("toy_run.name = 'open", 1),
        ("toy_run:\nsteps = 3", 2),
        ("toy_run:\n    steps = 3\n  rate = 1", 3),
    ],
)
def test_syntax_error_names_the_line(write, text, line):
    path = write(text)
    message = fails(path)
    assert message.startswith(f"{path}:")
    assert abs(int(message.removeprefix(f"{path}:").split(":")[0]) - line) <= 1


def test_undefined_macro(write):
    path = write("learning_rate = 1.0\ntoy_run.steps = 3\ntoy_run.rate = %learning_rat\n")
    assert fails(path) == (
        f"{path}:3: macro %learning_rat is not defined; the closest known is 'learning_rate'."
    )


def test_missing_file_lists_the_shipped_configs(tmp_path, monkeypatch):
    monkeypatch.setattr(_config, "CONFIG_DIR", tmp_path)
    (tmp_path / "b.gin").write_text("toy_run.steps = 1")
    (tmp_path / "a.gin").write_text("toy_run.steps = 2")
    assert fails("absent.gin") == "config file 'absent.gin' not found. Shipped configs: a.gin, b.gin."
    load_config("a")
    assert toy_run()["steps"] == 2


def test_unreadable_file_and_unknown_import(write, tmp_path):
    (tmp_path / "bytes.gin").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in fails(tmp_path / "bytes.gin")
    assert ":1: cannot import no_such_module" in fails(write("import no_such_module"))


def test_required_in_the_file_left_standing(write):
    assert "toy_run.steps set to `%gin.REQUIRED`" in fails(write("toy_run.steps = %gin.REQUIRED"))


def test_missing_required_parameter_is_named_with_exit_code_2(write, capfd):
    path = write("toy_run.rate = 1.0")

    def main(argv):
        load_config(path, argv)
        toy_run()

    assert run_program(main, []) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err == (
        "error: config: toy_run.steps must be set and is not. "
        "Set it in the config file or with --set toy_run.steps=VALUE.\n"
    )
    assert run_program(main, ["toy_run.steps=2"]) == 0


def test_user_error_through_a_configurable_stays_one_line(write, capfd):
    @gin.configurable
    def toy_refuses(level: int = 1):
        with checking("bag spec"):
            raise ValueError(f"parse_bags: rule;\n    got level={level}.")

    load_config(write("toy_refuses.level = 3"))
    assert run_program(lambda argv: toy_refuses(), []) == 2
    assert capfd.readouterr().err == "error: bag spec: parse_bags: rule; got level=3.\n"


def test_other_exceptions_are_defects_and_pass(capfd):
    def broken(argv):
        raise RuntimeError("unexpected")

    with pytest.raises(RuntimeError, match="unexpected"):
        run_program(broken, [])

    def interrupted(argv):
        raise KeyboardInterrupt

    assert run_program(interrupted, []) == 130
    assert run_program(lambda argv: 5, []) == 5


def test_checking_marks_only_what_a_user_can_cause():
    for kind in (ValueError, TypeError, NotImplementedError):
        with pytest.raises(UserError, match=r"^plan: no$"), checking("plan"):
            raise kind("no")
    with pytest.raises(KeyError), checking("plan"):
        raise KeyError("x")


def test_versions():
    found = _config.versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["jax"]
    assert found["numpy"]


def test_importing_does_no_work():
    code = (
        "import sys, experiments._config, experiments._signals; "
        "assert 'jax' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_modules_run_as_programs_register_no_configurable():
    # gin would register it as `__main__.name`, so that a config file cannot bind it under the module's name.
    for path in PROGRAMS.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if not any("__main__" in ast.unparse(node) for node in tree.body if isinstance(node, ast.If)):
            continue
        decorators = [
            ast.unparse(decorator)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            for decorator in node.decorator_list
        ]
        assert not [name for name in decorators if "gin." in name or "configurable" in name], path

"""The plan as a value: its text, what it refuses, and which rule decides for a module."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floatplan import Policy
from floatplan.errors import FloatplanError, PlanError
from floatplan.policy import Decision, ModuleRule, OpClass, Plan
from floatplan.policy.plan import OP_CLASSES, PRECISIONS

TEXT = """\
[default]
precision = "bf16"

[[rule]]
module = "blocks.*.mlp"
precision = "fp32"

[[rule]]
module = "head"
precision = "bf16"
ops = { lower = ["mylib::my_op"], fp32 = ["aten::linear"] }
"""
PLAN = Plan(
    "bf16",
    (
        ModuleRule("blocks.*.mlp", "fp32"),
        ModuleRule("head", "bf16", (("lower", ("mylib::my_op",)), ("fp32", ("aten::linear",)))),
    ),
)
NAMES = [
    "",
    *("embed", "blocks", "head", "norm"),
    *(f"blocks.{i}{part}" for i in range(3) for part in ("", ".mlp", ".mlp.fc1", ".mlp.fc2", ".attn")),
]

# --- Text -----------------------------------------------------------------------------------------------

# Every character that a string can have, those that TOML escapes among them, but for half surrogates.
parts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=".:"), min_size=1)
segments = st.just("**") | parts.filter(lambda part: "**" not in part)
globs = st.lists(segments, max_size=4).map(".".join)
operators = st.builds("{}::{}".format, parts, parts)


@st.composite
def module_rules(draw: st.DrawFn) -> ModuleRule:
    precision = draw(st.sampled_from(PRECISIONS))
    of_class = {} if precision == "fp32" else draw(st.dictionaries(operators, st.sampled_from(OP_CLASSES)))
    ops = tuple((key, tuple(op for op, cls in of_class.items() if cls == key)) for key in OP_CLASSES)
    return ModuleRule(draw(globs), precision, ops)


plans = st.builds(Plan, st.sampled_from(PRECISIONS), st.lists(module_rules(), max_size=4).map(tuple))


@given(plans)
def test_round_trip(plan: Plan) -> None:
    again = Plan.parse(plan.text)
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.text == plan.text == str(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_text_is_canonical(tmp_path: Path) -> None:
    assert Plan.parse(TEXT) == PLAN
    assert PLAN.text == TEXT
    untidy = """
    rule = [{precision="fp32",module='blocks.*.mlp'},   # a comment
      {module="head",ops={fp32=["aten::linear","aten::linear"],lower=["mylib::my_op"],inner=[]},precision="bf16"}]
    default.precision = 'bf16'
    """
    assert Plan.parse(untidy).text == TEXT
    for ending in ("\n", "\r\n"):
        (tmp_path / "in.toml").write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", ending).encode())
        assert Plan.load(tmp_path / "in.toml") == PLAN
    PLAN.save(tmp_path / "out.toml")
    assert (tmp_path / "out.toml").read_bytes() == TEXT.encode()
    assert Plan.load(str(tmp_path / "out.toml")) == PLAN
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.toml")


def test_values() -> None:
    assert Plan("bf16") != Plan("fp16")
    assert Plan("bf16") != "bf16"
    assert Plan("bf16", [ModuleRule("a", "fp32")]) == Plan("bf16", (ModuleRule("a", "fp32"),))  # type: ignore[arg-type]
    assert ModuleRule("a", "bf16", {"fp32": ["aten::exp"]}) == ModuleRule(  # type: ignore[arg-type]
        "a", "bf16", (("fp32", ("aten::exp",)), ("lower", ()))
    )
    assert len({PLAN, Plan.parse(TEXT)}) == 1
    with pytest.raises(AttributeError):
        PLAN.default = "fp32"  # type: ignore[misc]


def test_ops_make_the_policy() -> None:
    policy = PLAN.rules[1].policy
    assert policy == Policy.unified().with_ops(fp32=["aten::linear"], lower=["mylib::my_op"])
    assert policy.class_of("aten::linear") is OpClass.FP32
    assert PLAN.rules[0].policy == Policy.unified()
    assert ModuleRule("a", "bf16", (("untouched", ("aten::exp",)),)).policy.class_of("aten::exp") is None


def test_a_plan_needs_no_torch() -> None:
    script = (
        "import sys, floatplan.policy as p; "
        f"plan = p.Plan.parse({TEXT!r}); plan.precisions(['', 'head', 'blocks.0.mlp']); plan.text; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], timeout=120, check=True)


# --- Errors ---------------------------------------------------------------------------------------------

HEAD = '[default]\nprecision = "bf16"\n'


def rule(text: str) -> str:
    return f"{HEAD}[[rule]]\n{text}\n"


def ops(text: str) -> str:
    return rule(f"module = 'a'\nprecision = 'bf16'\nops = {text}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[default\n", r"not TOML: .*line 1"),
        ("", r"the plan lacks 'default'"),
        ("[default]", r"\[default\] lacks 'precision'"),
        ("default = 'bf16'", r"default must be one table, written \[default\], got 'bf16'"),
        ("[[default]]\nprecision = 'bf16'", r"default must be one table"),
        ("[defaults]\nprecision = 'bf16'", r"unknown key 'defaults'; did you mean 'default'"),
        (HEAD + "[[rules]]\nmodule = 'a'", r"the plan has the unknown key 'rules'; did you mean 'rule'"),
        (HEAD + "[rule]\nmodule = 'a'\nprecision = 'fp32'", r"written \[\[rule\]\] in double brackets"),
        (HEAD + "rule = 1", r"\[default\] has the unknown key 'rule'"),
        ("rule = [1]\n" + HEAD, r"each rule must be a table"),
        (HEAD + "ops = {}", r"\[default\] has the unknown key 'ops'; known here: precision"),
        ("[default]\nprecision = 'bf61'", r"default: unknown precision 'bf61'; did you mean 'bf16'"),
        ("[default]\nprecision = 16", r"default: precision must be one of .*fp32, bf16, fp16, got 16"),
        ("[default]\nprecision = 'bfloat16'", r"default: precision 'bfloat16' is written 'bf16'"),
        ("[default]\nprecision = 'fp64'", r"no module can run in precision 'fp64'; .*fp32, bf16, fp16"),
        (rule("precision = 'fp32'"), r"rule 1 lacks 'module'"),
        (rule("module = 'a'"), r"rule 1 lacks 'precision'"),
        (rule("modul = 'a'"), r"rule 1 has the unknown key 'modul'; did you mean 'module'"),
        (rule("x = 1"), r"rule 1 has the unknown key 'x'; known here: module, precision, ops"),
        (rule("module = 3\nprecision = 'fp32'"), r"rule 1: module must be a string .*, got 3"),
        (rule("module = 'a'\nprecision = true"), r"rule 1: precision must be one of .*, got True"),
        (rule("module = 'a..b'\nprecision = 'fp32'"), r"rule 1: module 'a\.\.b' has an empty segment"),
        (rule("module = 'a**'\nprecision = 'fp32'"), r"rule 1: in module 'a\*\*' '\*\*' must stand alone"),
        (ops("['aten::exp']"), r"rule 1: ops must be a table .*, got \['aten::exp'\]"),
        (ops("'aten::exp'"), r"rule 1: ops must be a table"),
        (ops("{fp23 = []}"), r"unknown operator class 'fp23'; did you mean 'fp32'"),
        (ops("{xyz = []}"), r"unknown operator class 'xyz'; known: lower, fp32,"),
        (ops("{fp32 = 'aten::exp'}"), r"fp32 must be a list of names .*, got 'aten::exp'"),
        (ops("{fp32 = [1]}"), r"fp32 must be a list of names .*, got \[1\]"),
        (ops("{fp32 = ['exp']}"), r"rule 1: ops: .*no namespace.*did you mean 'aten::exp"),
        (ops("{fp32 = ['aten::exp'], lower = ['aten::exp']}"), r"ops: aten::exp is given two classes"),
        (ops("{fp32 = []}").replace("bf16'\nops", "fp32'\nops").replace("[]", "['aten::exp']"),
         r"rule 1: ops have no effect where precision is 'fp32'"),
    ],
)  # fmt: skip
def test_errors_name_the_key_and_the_nearest(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"(?s){said}"):
        Plan.parse(text)
    (tmp_path / "plan.toml").write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=r"plan\.toml: "):
        Plan.load(tmp_path / "plan.toml")


def test_errors_outside_of_the_text(tmp_path: Path) -> None:
    assert issubclass(PlanError, FloatplanError)
    assert issubclass(PlanError, ValueError)
    with pytest.raises(PlanError, match=r"takes a string, got \w+; Plan\.load takes a path"):
        Plan.parse(Path("/plan.toml"))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="rule 1 must be a ModuleRule, got 'a'"):
        Plan("bf16", ("a",))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="half of a surrogate pair"):
        ModuleRule("\ud800", "bf16")
    with pytest.raises(PlanError, match="half of a surrogate pair"):
        ModuleRule("a", "bf16", (("fp32", ("a::\udfff",)),))
    (tmp_path / "plan.toml").write_bytes(b"\xff\xff")
    with pytest.raises(PlanError, match=r"plan\.toml: the plan is not UTF-8"):
        Plan.load(tmp_path / "plan.toml")


# --- Names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "matched", "others"),
    [
        ("", [""], ["a"]),
        ("a", ["a"], ["", "b", "a.b", "x.a", "A"]),
        ("*", ["a", "blocks"], ["", "a.b"]),
        ("a.*", ["a.b", "a.0"], ["a", "a.b.c"]),
        ("blocks.*.mlp", ["blocks.0.mlp"], ["blocks.mlp", "blocks.0.1.mlp", "blocks.0.mlp.fc1"]),
        ("**", ["", "a", "a.b.c"], []),
        ("**.mlp", ["mlp", "a.mlp", "a.b.mlp"], ["", "amlp", "mlp.a"]),
        ("a.**", ["a", "a.b", "a.b.c"], ["", "ab"]),
        ("a.**.c", ["a.c", "a.b.c", "a.b.b.c"], ["a", "ac"]),
        ("**.b.**", ["b", "a.b.c", "b.b"], ["a", "ab"]),
        ("blocks.[0-2]", ["blocks.0", "blocks.2"], ["blocks.3", "blocks.00"]),
        ("blocks.[!0]", ["blocks.1"], ["blocks.0"]),
        ("fc?", ["fc1"], ["fc", "fc10", "fc."]),
        ("*_proj", ["q_proj", "_proj"], ["q_proj2", "a.q_proj"]),
    ],
)
def test_globs(glob: str, matched: list[str], others: list[str]) -> None:
    written = ModuleRule(glob, "fp32")
    assert [name for name in matched if not written.matches(name)] == []
    assert [name for name in others if written.matches(name)] == []


def test_a_rule_covers_what_lies_inside_and_the_last_one_decides() -> None:
    rules = (
        ModuleRule("blocks", "fp16"),
        ModuleRule("blocks.*.mlp", "fp32"),
        ModuleRule("blocks.1", "bf16"),
        ModuleRule("blocks.2.mlp.fc1", "bf16"),
    )
    said = Plan("bf16", rules).precisions(NAMES)
    assert list(said) == NAMES
    assert said[""] == said["embed"] == Decision("bf16")
    assert said["blocks.0.attn"] == Decision("fp16", 1, rules[0])
    assert said["blocks.0.mlp"] == said["blocks.0.mlp.fc1"] == Decision("fp32", 2, rules[1])
    assert said["blocks.1.mlp.fc1"].number == 3  # the later word on what is around it counts
    assert said["blocks.2.mlp.fc1"].number == 4
    assert said["blocks.2.mlp.fc2"].number == 2
    assert str(said["head"]) == "bf16 (default)"
    assert str(said["blocks.0.mlp"]) == "fp32 (rule 2, 'blocks.*.mlp')"
    assert Plan("bf16", (*rules, ModuleRule("", "fp32"))).precisions(NAMES)["blocks.2.mlp.fc1"].number == 5


paths = st.lists(st.sampled_from("ab"), max_size=4).map(".".join)
small_globs = st.lists(st.sampled_from(["a", "b", "*", "**"]), max_size=3).map(".".join)


@given(st.lists(small_globs, max_size=4), st.sets(paths, min_size=1))
def test_the_last_rule_that_covers_decides(globs: list[str], names: set[str]) -> None:
    rules = tuple(ModuleRule(glob, "fp32") for glob in globs)
    if not all(any(rule.matches(name) for name in names) for rule in rules):
        with pytest.raises(PlanError, match="matches no module"):
            Plan("bf16", rules).precisions(names)
        return
    said = Plan("bf16", rules).precisions(names)
    for name in names:
        parts = name.split(".") if name else []
        around = [".".join(parts[:count]) for count in range(len(parts) + 1)]
        covering = [n for n, rule in enumerate(rules, 1) if any(map(rule.matches, around))]
        assert said[name].number == max(covering, default=0)


@pytest.mark.parametrize(
    ("glob", "said"),
    [
        ("blocks.*.mpl", r"rule 2 \(module = 'blocks\.\*\.mpl'\) matches no module of the model"
                         r"; did you mean 'blocks\.\*\.mlp'"),
        ("blocks.[01].mlp.fx1", r"did you mean 'blocks\.\[01\]\.mlp\.fc1'"),
        ("block.*.atn", r"did you mean 'blocks\.\*\.attn'"),
        ("blocks.mlp.fc1", r"did you mean 'blocks\.\d\.mlp\.fc1' or"),
        ("heda", r"did you mean 'head'\?"),
        ("mlp", r"did you mean '\*\*\.mlp'\?"),
        ("*.*.fc1", r"did you mean '\*\*\.\*\.\*\.fc1'\?"),
        ("zzz", r"; its modules: 'embed', 'blocks', .*, \.\.\."),
    ],
)  # fmt: skip
def test_a_rule_that_matches_nothing_lists_the_nearest(glob: str, said: str) -> None:
    plan = Plan("bf16", (ModuleRule("head", "fp32"), ModuleRule(glob, "fp32")))
    with pytest.raises(PlanError, match=said):
        plan.precisions(NAMES)


def test_a_rule_on_a_model_without_parts() -> None:
    assert Plan("bf16", (ModuleRule("", "fp32"),)).precisions([""])[""].precision == "fp32"
    with pytest.raises(PlanError, match="its modules: none"):
        Plan("bf16", (ModuleRule("a", "fp32"),)).precisions([""])

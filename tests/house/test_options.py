"""The options: names, values, the environment's twins, and the words of every refusal."""

import dataclasses
import json
import pathlib
import types
from dataclasses import replace

import pytest
import torch

from zerofx.compiler.choices import choose
from zerofx.hardware import Hardware, Link, with_links
from zerofx.options import ABSENT, OPTIONAL_PASSES, OPTIONS, Options, refuse_mode, resolve


class Group:
    """Stands for a process group whose equality is by value, like a device mesh's."""

    def __eq__(self, other):
        return isinstance(other, Group)

    def __hash__(self):
        return 0


def words_of(kind, options, environ=None):
    """Return the message of the error that these options must raise."""
    with pytest.raises(kind) as raised:
        resolve(options, environ or {})
    assert raised.type is kind
    return str(raised.value)


def test_defaults_are_the_contracts():
    assert dataclasses.asdict(resolve(None, {})) == {
        "stage": 3,
        "lowering": "inductor",
        "process_group": None,
        "secondary_shard": None,
        "accumulate": None,
        "loss": "rank",
        "batch_norm": "local",
        "uneven": False,
        "chunk_loss": None,
        "reduce_dtype": None,
        "gather_dtype": None,
        "reduce_wire": None,
        "outer_wire": None,
        "error_feedback": None,
        "outer_feedback": None,
        "bucket_bytes": None,
        "memory_budget": None,
        "hardware": None,
        "plan": None,
        "memory_limit": None,
        "offload": (),
        "offload_tier": "cpu",
        "offload_dir": (),
        "offload_cache_bytes": None,
        "offload_checksums": False,
        "delayed_update": False,
        "start": "compiled",
        "program_cache": True,
        "dump": None,
        "validate": False,
        "check_order": False,
        "recompute": True,
        "hoist_casts": True,
        "bucket": True,
        "update_in_backward": True,
        "prefetch": True,
        "fuse_optimizer": True,
        "peer_memory": True,
        "master_weights": False,
        "stochastic_rounding": False,
        "moment_dtype": None,
        "rounding_seed": 0,
        "outer_stage": None,
        "stop_after": None,
    }


def test_no_options_and_empty_options_are_the_same():
    assert resolve(None, {}) == resolve({}, {}) == Options()


@pytest.mark.parametrize(
    "name, value",
    [
        *(("stage", stage) for stage in range(4)),
        ("lowering", "eager"),
        ("lowering", "inductor"),
        ("accumulate", None),
        ("accumulate", "local"),
        ("accumulate", "sharded"),
        ("reduce_dtype", None),
        ("reduce_dtype", torch.bfloat16),
        ("bucket_bytes", None),
        ("bucket_bytes", 1),
        ("bucket_bytes", 2**40),
        ("hardware", None),
        ("hardware", Hardware(latency_s=0.0, bytes_per_s=1.0)),
        ("dump", None),
        ("dump", "programs"),
        ("master_weights", True),
        ("stochastic_rounding", True),
        ("moment_dtype", None),
        ("moment_dtype", torch.bfloat16),
        ("moment_dtype", torch.int8),
        ("rounding_seed", -3),
        *((name, on) for name in OPTIONAL_PASSES for on in (True, False)),
    ],
)
def test_every_allowed_value_is_kept(name, value):
    resolved = getattr(resolve({name: value}, {}), name)
    assert resolved is value or resolved == value
    assert type(resolved) is type(value)


@pytest.mark.parametrize(
    "name, text, value",
    [
        *(("stage", str(stage), stage) for stage in range(4)),
        ("lowering", "inductor", "inductor"),
        ("accumulate", "local", "local"),
        ("accumulate", "sharded", "sharded"),
        ("reduce_dtype", "bfloat16", torch.bfloat16),
        ("reduce_dtype", "torch.float32", torch.float32),
        ("bucket_bytes", "1048576", 1048576),
        ("bucket_bytes", "25e6", 25_000_000),
        ("hardware", "latency_s=1e-4,bytes_per_s=1e9", Hardware(1e-4, 1e9)),
        ("hardware", "bytes_per_s=2 latency_s=0 overlaps=0", Hardware(0.0, 2.0, overlaps=False)),
        ("dump", "programs/of a step", "programs/of a step"),
        ("master_weights", "1", True),
        ("stochastic_rounding", "on", True),
        ("moment_dtype", "int8", torch.int8),
        ("moment_dtype", "torch.bfloat16", torch.bfloat16),
        ("rounding_seed", "17", 17),
        ("check_order", "1", True),
        *((name, "0", False) for name in OPTIONAL_PASSES),
    ],
)
def test_every_option_can_be_set_by_its_twin(name, text, value):
    resolved = resolve(None, {f"ZEROFX_{name.upper()}": text})
    assert resolved == dataclasses.replace(Options(), **{name: value})
    assert type(getattr(resolved, name)) is type(value)


@pytest.mark.parametrize(
    "options, environ, name, value",
    [
        ({"stage": 1}, {"ZEROFX_STAGE": "2"}, "stage", 2),
        ({"lowering": "inductor"}, {"ZEROFX_LOWERING": "eager"}, "lowering", "eager"),
        ({"accumulate": "local"}, {"ZEROFX_ACCUMULATE": "sharded"}, "accumulate", "sharded"),
        (
            {"reduce_dtype": torch.float32},
            {"ZEROFX_REDUCE_DTYPE": "bfloat16"},
            "reduce_dtype",
            torch.bfloat16,
        ),
        ({"bucket_bytes": 7}, {"ZEROFX_BUCKET_BYTES": "8"}, "bucket_bytes", 8),
        ({"dump": "a"}, {"ZEROFX_DUMP": "b"}, "dump", "b"),
        ({"prefetch": True}, {"ZEROFX_PREFETCH": "0"}, "prefetch", False),
        ({"prefetch": False}, {"ZEROFX_PREFETCH": "1"}, "prefetch", True),
    ],
)
def test_the_environment_wins(options, environ, name, value):
    assert getattr(resolve(options, environ), name) == value


def test_the_environment_wins_only_where_it_speaks():
    resolved = resolve({"stage": 1, "dump": "a"}, {"ZEROFX_STAGE": "2"})
    assert (resolved.stage, resolved.dump) == (2, "a")


def test_a_value_that_the_environment_overrides_is_checked_too():
    assert "stage must be one of" in words_of(ValueError, {"stage": 4}, {"ZEROFX_STAGE": "2"})


@pytest.mark.parametrize("name", ["accumulate", "reduce_dtype", "bucket_bytes", "dump"])
def test_an_empty_variable_restores_a_default_of_none(name):
    given = {"accumulate": "local", "reduce_dtype": torch.float32, "bucket_bytes": 7, "dump": "a"}
    given = given[name]
    assert getattr(resolve({name: given}, {f"ZEROFX_{name.upper()}": ""}), name) is None


@pytest.mark.parametrize("name", ["stage", "lowering", *OPTIONAL_PASSES])
def test_an_empty_variable_is_refused_where_the_default_is_a_value(name):
    assert f"ZEROFX_{name.upper()} must be one of" in words_of(
        ValueError, None, {f"ZEROFX_{name.upper()}": ""}
    )


def test_the_process_environment_is_read_when_no_other_is_given(monkeypatch):
    monkeypatch.setenv("ZEROFX_STAGE", "1")
    assert resolve(None).stage == 1
    monkeypatch.setenv("ZEROFX_STAGE", "2")
    assert resolve(None).stage == 2


def test_other_variables_are_none_of_our_business():
    environ = {"PATH": "/bin", "ZERO_STAGE": "9", "MY_ZEROFX_STAGE": "9", "zerofx_stage": "9"}
    assert resolve(None, environ) == Options()


@pytest.mark.parametrize("on", ["1", "true", "True", "TRUE", "on", "ON", "yes", "Yes"])
def test_words_for_on(on):
    assert resolve({"prefetch": False}, {"ZEROFX_PREFETCH": on}).prefetch is True
    assert resolve({"prefetch": on}, {}).prefetch is True


@pytest.mark.parametrize("off", ["0", "false", "False", "FALSE", "off", "OFF", "no", "No"])
def test_words_for_off(off):
    assert resolve(None, {"ZEROFX_PREFETCH": off}).prefetch is False
    assert resolve({"prefetch": off}, {}).prefetch is False


def test_switches_accept_zero_and_one():
    assert resolve({"prefetch": 0}, {}).prefetch is False
    assert resolve({"prefetch": 1}, {}).prefetch is True


@pytest.mark.parametrize("value", [2, -1, "maybe", "", "2"])
def test_switches_refuse_other_values(value):
    assert words_of(ValueError, {"prefetch": value}) == (
        f"prefetch must be one of 0, 1, false, true, off, on, no, yes, not {value!r}"
    )


@pytest.mark.parametrize("value", [None, 1.0, [], torch.tensor(True)])
def test_switches_refuse_other_types(value):
    assert "prefetch must be True or False, not" in words_of(TypeError, {"prefetch": value})


@pytest.mark.parametrize("stage", [4, -1, 10**9])
def test_an_unknown_stage_names_the_four(stage):
    assert words_of(ValueError, {"stage": stage}) == (
        f"stage must be one of 0, 1, 2, 3, not {stage}"
    )


@pytest.mark.parametrize("text", ["4", "three", "3.0", " 3", "03", "True"])
def test_an_unknown_stage_in_the_environment_names_the_variable(text):
    assert words_of(ValueError, None, {"ZEROFX_STAGE": text}) == (
        f"ZEROFX_STAGE must be one of 0, 1, 2, 3, not {text!r}"
    )


@pytest.mark.parametrize("stage", [True, False, "3", 3.0, None, [3]])
def test_a_stage_of_another_type_is_refused(stage):
    assert words_of(TypeError, {"stage": stage}) == (
        "stage must be one of 0, 1, 2, 3 (int), or a dict with one for each axis of a mesh, not "
        f"{stage!r} of type {type(stage).__name__}"
    )


class NamedMesh:
    mesh_dim_names = ("node", "gpu")


@pytest.mark.parametrize("text", ["gpu:3,node:0", " node : 0, gpu : 3"])
def test_a_mesh_has_a_stage_for_each_axis(text):
    options = {"process_group": NamedMesh()}
    given = resolve({**options, "stage": {"gpu": 3, "node": 0}}, {})
    assert (given.stage, given.outer_stage, given.stage_outside) == (3, 0, 0)
    assert resolve(options, {"ZEROFX_STAGE": text}) == replace(
        given, process_group=options["process_group"]
    )


@pytest.mark.parametrize(
    "stages, words",
    [
        ({"gpu": 4, "node": 0}, "of axis 'gpu' must be one of 0, 1, 2, 3, not 4"),
        ({"gpu": True, "node": 0}, "must give axes of a mesh, by name, their stages, not"),
        ({0: 3, 1: 0}, "must give axes of a mesh, by name, their stages, not"),
        ("gpu:three,node:0", "of axis 'gpu' must be one of 0, 1, 2, 3, not 'three'"),
        ("gpu:,node:0", "of axis 'gpu' must be one of 0, 1, 2, 3, not ''"),
    ],
)
def test_a_stage_of_an_axis_that_is_none_is_refused(stages, words):
    is_text = isinstance(stages, str)
    options = {"process_group": NamedMesh(), **({} if is_text else {"stage": stages})}
    with pytest.raises((TypeError, ValueError), match=words):
        resolve(options, {"ZEROFX_STAGE": stages} if is_text else {})


@pytest.mark.parametrize("inner, legal", [(0, "0"), (1, "0 or 1"), (2, "0 or 1 or 2")])
def test_a_larger_stage_on_the_outer_axis_is_refused_with_the_legal_ones(inner, legal):
    options = {"process_group": NamedMesh(), "stage": {"gpu": inner, "node": inner + 1}}
    message = words_of(ValueError, options)
    assert message.endswith(f"With stage {inner} there, node may have {legal}")


@pytest.mark.parametrize("environ", [False, True])
@pytest.mark.parametrize(
    "name, value, allowed",
    [("lowering", "Eager", "eager, inductor"), ("accumulate", "remote", "local, sharded")],
)
def test_a_wrong_word_names_the_right_ones(name, value, allowed, environ):
    if environ:
        variable = f"ZEROFX_{name.upper()}"
        message = words_of(ValueError, None, {variable: value})
        assert message == f"{variable} must be one of {allowed}, not {value!r}"
    else:
        message = words_of(ValueError, {name: value})
        assert message == f"{name} must be one of {allowed}, not {value!r}"


@pytest.mark.parametrize(
    "name, value",
    [
        ("lowering", None),
        ("lowering", 1),
        ("accumulate", 1),
        ("accumulate", True),
        ("reduce_dtype", 16),
        ("reduce_dtype", float),
        ("bucket_bytes", True),
        ("bucket_bytes", 25e6),
        ("bucket_bytes", "25e6"),
        ("hardware", 1e9),
        ("hardware", True),
        ("dump", True),
        ("dump", b"programs"),
    ],
)
def test_other_types_are_refused_by_name(name, value):
    message = words_of(TypeError, {name: value})
    assert message.startswith(f"{name} must be ")
    assert message.endswith(f"not {value!r} of type {type(value).__name__}")


@pytest.mark.parametrize("given", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_a_reduce_dtype_is_a_dtype_or_its_name(given):
    assert resolve({"reduce_dtype": given}, {}).reduce_dtype is torch.bfloat16


@pytest.mark.parametrize("given", [torch.int64, torch.complex64, torch.bool, "int8", "bf16", ""])
def test_a_reduce_dtype_that_gradients_cannot_be_summed_in_is_refused(given):
    assert words_of(ValueError, {"reduce_dtype": given}).startswith(
        "reduce_dtype must be one of float16, bfloat16, float32, float64, not "
    )


@pytest.mark.parametrize("value", [0, -1])
def test_a_number_of_bytes_is_positive(value):
    words = f"bucket_bytes must be a positive number of bytes, not {value}"
    assert words_of(ValueError, {"bucket_bytes": value}) == words


@pytest.mark.parametrize("text", ["much", "1 MiB", "nan", "inf", "0x10"])
def test_a_number_of_bytes_in_the_environment_is_a_number(text):
    words = f"ZEROFX_BUCKET_BYTES must be a whole number of bytes, not {text!r}"
    assert words_of(ValueError, None, {"ZEROFX_BUCKET_BYTES": text}) == words


@pytest.mark.parametrize("text", ["0", "-5", "0.5"])
def test_a_number_of_bytes_in_the_environment_is_positive(text):
    message = words_of(ValueError, None, {"ZEROFX_BUCKET_BYTES": text})
    assert message.startswith("ZEROFX_BUCKET_BYTES must be a positive number of bytes, not ")


def test_a_link_is_text_or_a_dict():
    given = {"latency_s": 1e-4, "bytes_per_s": 10**9, "overlaps": False}
    expected = Hardware(1e-4, 1e9, overlaps=False)
    assert resolve({"hardware": given}, {}).hardware == expected
    assert resolve({"hardware": str(expected)}, {}).hardware == expected


@pytest.mark.parametrize(
    "text, why",
    [
        ("fast", "'fast' is not of the form name=number, nor a .json file's path"),
        ("latency_s=1e-4", "bytes_per_s is missing; needed: latency_s, bytes_per_s"),
        ("latency=1e-4 bytes_per_s=1e9", "'latency' is unknown; known: latency_s, bytes_per_s,"),
        ("latency_s=1e-4 bytes_per_s=0", "bytes_per_s is a positive number, not '0'"),
        ("latency_s=-1 bytes_per_s=1e9", "latency_s is a positive number or 0, not '-1'"),
        ("latency_s=1e-4 bytes_per_s=inf", "bytes_per_s is a positive number, not 'inf'"),
        ("latency_s=nan bytes_per_s=1e9", "latency_s is a positive number or 0, not 'nan'"),
        ("latency_s=1e-4 bytes_per_s=1GB", "bytes_per_s is a positive number, not '1GB'"),
        ("latency_s=1e-4 bytes_per_s=1e9 overlaps=2", "overlaps is 0 or 1, not '2'"),
        ("latency_s=1 latency_s=2 bytes_per_s=1e9", "latency_s is given twice"),
    ],
)
def test_figures_that_are_none_are_refused_with_the_reason(text, why):
    for message in (
        words_of(ValueError, {"hardware": text}),
        words_of(ValueError, None, {"ZEROFX_HARDWARE": text}),
    ):
        assert "must be figures like 'latency_s=3e-4 bytes_per_s=1e9', not " in message
        assert why in message


NODE, GPU = {"latency_s": 1e-3, "bytes_per_s": 1e8}, {"latency_s": 0, "bytes_per_s": 1e10}
ON_MESH = {"process_group": types.SimpleNamespace(mesh_dim_names=("node", "gpu"))}


def test_figures_by_axis_are_a_dict_a_file_or_text(tmp_path):
    links = {"node": Link(1e-3, 1e8), "gpu": Link(0.0, 1e10)}
    expected = with_links(links, flops_per_s=1e12)
    given = {"node": NODE, "gpu": GPU, "flops_per_s": 1e12}
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(given))
    for hardware in (given, path, str(expected), expected):
        assert resolve({**ON_MESH, "hardware": hardware}, {}).hardware == expected
    text = str(expected).replace(" ", ",")
    assert resolve(ON_MESH, {"ZEROFX_HARDWARE": text}).hardware == expected


@pytest.mark.parametrize(
    "figures, why",
    [
        ({"node": {"latency_s": 1}}, "node.bytes_per_s is missing; needed: latency_s, bytes_per_s"),
        ({"node": {}, "gpu": GPU}, "node.latency_s is missing"),
        ({"node": {**NODE, "flops_per_s": 1}}, "node.flops_per_s is none of a link, and the same"),
        ({"node": {**NODE, "speed": 1}}, "'node.speed' is unknown; known: latency_s, bytes_per_s,"),
        ({"node": {**NODE, "latency_s": -1}}, "node.latency_s is a positive number or 0, not -1"),
        ({"node": {**NODE, "overlaps": 2}}, "node.overlaps is 0 or 1, not 2"),
        ({"node": NODE, "node.latency_s": 1}, "node.latency_s is given twice"),
        ({**GPU, "node": NODE}, "latency_s is given beside that of node: give it to each axis"),
        ({"node": 1e9}, "'node' is unknown; known: latency_s, bytes_per_s,"),
    ],
)
def test_figures_by_axis_that_are_none_are_refused_with_the_reason(figures, why):
    message = words_of(ValueError, {**ON_MESH, "hardware": figures})
    assert message.startswith("hardware must be figures like ") and why in message


@pytest.mark.parametrize(
    "axes, mesh, why",
    [
        (("node", "gpu"), None, "goes by the axes of a device mesh, and process_group is none"),
        (("node", "gpu"), types.SimpleNamespace(), "process_group is not one with names"),
        (
            ("rack", "gpu"),
            ("node", "gpu"),
            "names rack, and the mesh in process_group has the axes",
        ),
        (("gpu",), ("node", "gpu"), "leaves out node, and the mesh in process_group has the axes"),
    ],
)
def test_figures_are_of_the_axes_that_the_mesh_has(axes, mesh, why):
    if isinstance(mesh, tuple):
        mesh = types.SimpleNamespace(mesh_dim_names=mesh)
    options = {"process_group": mesh} if mesh else {}
    hardware = with_links({axis: Link(0.0, 1e9) for axis in axes})
    for message in (
        words_of(ValueError, {**options, "hardware": hardware}),
        words_of(ValueError, options, {"ZEROFX_HARDWARE": str(hardware)}),
    ):
        assert message.startswith(f"hardware='{hardware}' ") and why in message


def test_dump_takes_a_path_object():
    assert resolve({"dump": pathlib.Path("programs", "here")}, {}).dump == str(
        pathlib.Path("programs", "here")
    )


def test_an_empty_dump_folder_is_refused():
    assert "not an empty string" in words_of(ValueError, {"dump": ""})


def test_a_process_group_is_kept_as_it_is():
    group = Group()
    assert resolve({"process_group": group}, {}).process_group is group


@pytest.mark.parametrize("group", ["world", 0, True, [0, 1], (0, 1), {0, 1}, range(2)])
def test_what_cannot_be_a_process_group_is_refused(group):
    message = words_of(TypeError, {"process_group": group})
    assert message.startswith("process_group must be a process group or a device mesh (")
    assert "new_group" in message


@pytest.mark.parametrize("text", ["", "world", "0,1"])
def test_a_process_group_has_no_twin_and_the_error_says_so(text):
    message = words_of(ValueError, None, {"ZEROFX_PROCESS_GROUP": text})
    assert "ZEROFX_PROCESS_GROUP cannot be set" in message
    assert "options={'process_group': group}" in message


def test_an_unknown_option_names_the_nearest_and_all_known_ones():
    known = list(OPTIONS)
    assert len(known) == 41
    assert words_of(ValueError, {"prefech": True}) == (
        f"option 'prefech' is unknown; did you mean 'prefetch'? Known: {', '.join(known)}"
    )


def test_an_unknown_variable_names_the_nearest_and_all_known_ones():
    names = [name for name in OPTIONS if name != "process_group"]
    known = [f"ZEROFX_{name.upper()}" for name in names]
    assert words_of(ValueError, None, {"ZEROFX_PREFECH": "0"}) == (
        "environment variable 'ZEROFX_PREFECH' is unknown; did you mean 'ZEROFX_PREFETCH'?"
        f" Known: {', '.join(known)}"
    )


def test_an_option_that_is_gone_says_why():
    words = words_of(ValueError, {"prefetch_across_steps": True})
    assert words.startswith("option 'prefetch_across_steps' is gone: no gain could be measured")
    words = words_of(ValueError, None, {"ZEROFX_PREFETCH_ACROSS_STEPS": "1"})
    assert "'ZEROFX_PREFETCH_ACROSS_STEPS' is gone" in words


def test_an_options_old_name_leads_to_the_new_one():
    words = words_of(ValueError, {"link": "latency_s=3e-4 bytes_per_s=1e9"})
    assert words.startswith("option 'link' is now called 'hardware'; rename it. Known: ")
    words = words_of(ValueError, None, {"ZEROFX_LINK": "latency_s=3e-4 bytes_per_s=1e9"})
    assert "'ZEROFX_LINK' is now called 'ZEROFX_HARDWARE'; rename it." in words


@pytest.mark.parametrize(
    "name, nearest",
    [("Stage", "stage"), ("stages", "stage"), ("zero_stage", "stage"), ("hoistcasts", "hoist_cas")],
)
def test_a_near_miss_is_told_what_it_missed(name, nearest):
    assert f"did you mean '{nearest}" in words_of(ValueError, {name: 1})


@pytest.mark.parametrize("name", ["q", "", "data_parallel", "verify", "____"])
def test_the_farthest_name_still_gets_a_nearest_one(name):
    assert "did you mean '" in words_of(ValueError, {name: True})


@pytest.mark.parametrize("variable", ["ZEROFX_", "ZEROFX_stage", "ZEROFX_STAGE_", "ZEROFX_VERIFY"])
def test_every_variable_with_the_prefix_must_be_known(variable):
    assert "is unknown; did you mean 'ZEROFX_" in words_of(ValueError, None, {variable: "1"})


def test_a_planned_option_is_called_planned():
    message = words_of(ValueError, {"clip": 1})
    assert message.startswith("option 'clip' is planned but not in this version; drop it.")
    assert "unknown" not in message


def test_a_planned_variable_is_called_planned():
    message = words_of(ValueError, None, {"ZEROFX_CLIP": "1"})
    assert message.startswith(
        "environment variable 'ZEROFX_CLIP' is planned but not in this version"
    )
    assert "unknown" not in message


def test_a_near_miss_of_a_planned_option_says_both():
    assert "did you mean 'clip', which is planned but not in this version?" in words_of(
        ValueError, {"clips": 1}
    )


@pytest.mark.parametrize("options", [[("stage", 3)], "stage=3", 3, {"stage"}])
def test_options_that_are_no_dict_are_refused(options):
    assert words_of(TypeError, options).startswith("options must be a dict of names to values, not")


def test_an_option_whose_name_is_no_string_is_refused():
    assert words_of(TypeError, {3: "stage"}) == (
        "the names of options are strings, not 3 of type int"
    )


def test_the_users_dict_is_left_alone():
    options = {"stage": 1, "reduce_dtype": "bfloat16"}
    resolve(options, {"ZEROFX_STAGE": "2"})
    assert options == {"stage": 1, "reduce_dtype": "bfloat16"}


def test_every_optional_pass_is_a_field_and_on_by_default():
    switches = {f.name for f in dataclasses.fields(Options) if isinstance(f.default, bool)}
    others = {"fuse_optimizer", "peer_memory", "master_weights", "stochastic_rounding"}
    others |= {"offload_checksums", "delayed_update", "validate", "check_order", "program_cache"}
    others |= {"uneven"}
    assert switches == {*OPTIONAL_PASSES, *others}
    assert all(map(Options().enabled, OPTIONAL_PASSES))


def test_no_absent_option_exists():
    assert not set(ABSENT) & set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONAL_PASSES)
@pytest.mark.parametrize("on", (True, False))
def test_turning_one_pass_on_or_off_leaves_the_others_as_they_are(name, on):
    resolved = resolve({name: on}, {})
    expected = {**{n: Options().enabled(n) for n in OPTIONAL_PASSES}, name: on}
    assert {n: resolved.enabled(n) for n in OPTIONAL_PASSES} == expected


def test_a_pass_that_is_not_optional_is_always_enabled():
    every_switch_off = resolve(dict.fromkeys(OPTIONAL_PASSES, False), {})
    assert every_switch_off.enabled("data_parallel")


def test_a_field_that_is_no_pass_says_nothing_about_a_pass():
    assert resolve({"stage": 0}, {}).enabled("stage") is True


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().stage = 2


def test_equal_options_are_equal_and_hash_alike():
    options = {"stage": 2, "reduce_dtype": torch.bfloat16, "dump": "a", "prefetch": False}
    assert resolve(options, {}) == resolve(dict(options), {})
    assert hash(resolve(options, {})) == hash(resolve(dict(options), {}))
    assert len({resolve(options, {}), resolve(dict(options), {})}) == 1


@pytest.mark.parametrize(
    "name, value",
    [
        ("stage", 0),
        ("lowering", "eager"),
        ("process_group", Group()),
        ("accumulate", "local"),
        ("reduce_dtype", torch.bfloat16),
        ("dump", "a"),
        *((name, not Options().enabled(name)) for name in OPTIONAL_PASSES),
    ],
)
def test_every_field_takes_part_in_equality(name, value):
    assert resolve({name: value}, {}) != Options()


def test_options_differ_from_what_is_no_options():
    assert Options() != dataclasses.asdict(Options())
    assert Options() != 3


def test_no_mode_is_no_error():
    refuse_mode(None)


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead", "zero"])
def test_a_mode_is_refused_with_the_remedy(mode):
    with pytest.raises(ValueError) as raised:
        refuse_mode(mode)
    assert f"mode={mode!r} has no meaning for backend='zero'" in str(raised.value)
    assert "options={'lowering': 'inductor'}" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"master_weights": 1, "stochastic_rounding": 1}, "exclude each other.*Choose one"),
        ({"stage": 0, "master_weights": 1}, "master_weights needs stage 1, 2 or 3"),
        ({"stage": 0, "moment_dtype": "int8"}, "moment_dtype needs stage 1, 2 or 3"),
        ({"moment_dtype": "float16"}, "moment_dtype must be one of bfloat16, int8"),
    ],
)
def test_precisions_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        choose(options, {})


@pytest.mark.parametrize("value", [1.5, "3", True, None])
def test_a_seed_is_an_integer(value):
    assert "rounding_seed must be an integer" in words_of(TypeError, {"rounding_seed": value})
    message = words_of(ValueError, {}, {"ZEROFX_ROUNDING_SEED": "a"})
    assert "ZEROFX_ROUNDING_SEED must be an integer, not 'a'" in message

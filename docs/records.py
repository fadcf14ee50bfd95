"""The reference of records and of the JSON of all commands: `python docs/records.py > docs/records.md`.

Records come from dpmon.record, and members of JSON from the tables and classes that declare them; this file says what
they mean, where the name does not. A test compares the other members with what the commands print.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from textwrap import fill
from typing import Any

from dpmon.cli.commands import ListedRun
from dpmon.cli.doctor import Check
from dpmon.model.findings.finding import Finding
from dpmon.record import schema
from dpmon.record.record_specs import RECORDS, FieldSpec, RecordSpec
from dpmon.report.health import Health
from dpmon.report.report_json import MEMORY_TREND, rank_time_members
from dpmon.report.tables import DEVICES, EPOCHS, MEMORY, PHASES, RANKS, REPLICAS, STAGES, mode_table
from dpmon.store.memory_growth import Growth
from dpmon.store.step_stats import rate_to_json
from dpmon.text.fact_table import FactTable, fields_of

WIDTH = 120


def item(names: Iterable[str], meaning: str = "") -> str:
    """Return an entry of a list: the names as code, and what they mean."""
    text = ", ".join(f"`{name}`" for name in names) + (f": {meaning}" if meaning else "")
    return fill(
        text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def items(prefix: str, members: Iterable[str], meaning: str = "", own: Mapping[str, str] | None = None) -> str:
    """Return entries for the declared members of an object: those with one meaning together, and those with their own.

    SystemExit if `own` has a name that is not a member.
    """
    own, names = own or {}, list(dict.fromkeys(members))
    if wrong := own.keys() - names:
        raise SystemExit(f"{prefix}: there is no {', '.join(sorted(wrong))}")
    shared = sorted((name + _INSIDE.get(name, "") for name in names if name not in own), key=lambda name: "*" in name)
    entries = [item([prefix + shared[0], *((f".{name}" if prefix else name) for name in shared[1:])], meaning)]
    entries += [item([prefix + name + _INSIDE.get(name, "")], text) for name, text in own.items()]
    return "\n".join(entries)


def members_of(table: FactTable[Any]) -> list[str]:
    """Return the members of an object in JSON that a table makes of a row."""
    names = [*fields_of(_Unknown(), *table.fields), *(column.member for column in table.columns if column.member)]
    return [*names, "absent"] if any(column.why is not None for column in table.columns) else names


class _Unknown:
    """An object whose members are all None."""

    def __getattr__(self, name: str) -> None:
        return None


_INSIDE = {"absent": ".*", "throttled": ".*", "job": ".*", "parts": "[]", "machines": "[]", "command": "[]"}
"""What follows the name of a member that is a list or an object."""


# ------------------------------------------------------------------------------------------------ records

_HEAD = """\
# Records and JSON

You want to know what a field means: of a [record](#records) that `dpmon export` writes, or of the [JSON of other
commands](#json-of-commands). `python docs/records.py > docs/records.md` makes this page.

- An unknown value is null, and `absent` (in `compared`, `communication` and `dpmon compare`: `missing`) has the reason.
- The end of a name gives the unit: `_s` and `seconds` are seconds, `_ms` milliseconds, `_bytes` bytes, `_pct` percent,
  `_w` watts, `_c` degrees Celsius. A `share` is a fraction from 0 to 1.
- `t_s`, `start_s`, `since_s` and `end_s` count from the run's start, on the monotonic clock.

## Records

In JSON lines, each record is an object with a member `kind`. In CSV, each kind is a table with a column for each field;
an empty cell means unknown or, for a phase, not run, and a list or an object is JSON in one cell. A field is a number,
or a boolean ("whether ..."), if nothing else is said. A name that begins with `dpmon_` is its Prometheus metric. These
fields are the same in all records:
"""
_PHASES = """\
### Phases of a step

They add up to its `wall_ms`; those from scatter to gather lie within `forward`. A phase that did not run is missing.
The metrics are `dpmon_step_phase_seconds_total` and `dpmon_call_phase_seconds_total`, with the label `phase`.
"""
_QUANTITIES = """\
### Quantities of a step

These are members of `step`, too.
"""
_QUANTITY_NAMES = {quantity.name for quantity in schema.QUANTITIES}


def _common_fields() -> dict[str, FieldSpec]:
    """Return the fields that are the same in at least three kinds of records, by name."""
    counts = Counter(field for kind in RECORDS.values() for field in kind.fields)
    return {field.name: field for field, count in counts.items() if count > 2}


def _record(kind: RecordSpec, common: Mapping[str, FieldSpec]) -> str:
    shared = [field.name for field in kind.fields if common.get(field.name) == field]
    own = [
        _field(field)
        for field in kind.fields
        if common.get(field.name) != field and not (kind.name == "step" and field.name in _QUANTITY_NAMES)
    ]
    entries = [item(shared), *own] if shared else own
    return f"### {kind.name}\n\n{fill(kind.meaning[0].upper() + kind.meaning[1:], WIDTH)}.\n\n" + _lines(entries)


def _field(field: FieldSpec) -> str:
    type_name = [] if field.type in ("integer", "number", "boolean") else [field.type]
    notes = ["in CSV a column for each time"] if field.columns else []
    metric = [f"`dpmon_{field.metric}`"] if field.metric else []
    return item((field.name,), "; ".join((*type_name, field.meaning, *notes, *metric)))


def _phases() -> str:
    names = {phase.name: f"{phase.display_name} on the screen: " for phase in schema.PHASES if phase.label}
    return _lines(item((phase.name,), names.get(phase.name, "") + phase.meaning) for phase in schema.PHASES)


def _quantities() -> str:
    return _lines(
        item((each.name,), f"{each.meaning}; `dpmon_{each.metric}`; missing if {each.absent}")
        for each in schema.QUANTITIES
    )


def _lines(entries: Iterable[str]) -> str:
    return "".join(f"{entry}\n" for entry in entries)


# ------------------------------------------------------------------------------------------------ JSON of commands

_FINDING = {
    "ground": "the measurements",
    "saves_s": "the most of `elapsed_s` that is saved if the cause disappears; null if no bound is reliable",
}
_HEALTH_STATE = "the [state](stuck.md#the-state-of-a-run), `elsewhere` or `unsupervised`"
_HEALTH = {
    "end": "how the run ended, as in `dpmon ls`; null while it is live",
    "fine": "whether it is training, evaluating, waiting for data or saving a checkpoint",
}
_LISTED_RUN = {
    "state": "the [state](stuck.md#the-state-of-a-run), `finished`, `stopped`, `failed`, `killed` (by a "
    "signal), `interrupted` (SIGINT), `ended` (status unknown), `unsupervised` (dpmon's background process was "
    "killed), `elsewhere` (on another node) or `lost` (ended without a record of its end)",
    "kept": "whether `dpmon keep` protects it",
    "seconds": "how long it took so far",
    "steps": "training steps of the process with the most; null while the end of a step is not known",
    "evaluation_word": "`evaluation`, or `without gradients` if these steps precede nearly every update",
    "unknown": "why the status is unknown",
    "cause": "why it failed",
    "standing": "why it is not training: what it does before the first step, or where each rank is or was at its end",
    "unreadable": "why its history cannot be read",
    "job": "its [job](machines.md#which-runs-are-one-job): `by` (`slurm`, `torchelastic`, `master`) and `id`, or null",
    "node": "the number of this node in the job",
    "machines": "the nodes that a [mirror](machines.md) reads; empty for other runs",
}
_EPOCH = {"length": "batches of its loader", "pause_s": "other time since the epoch before"}
_MODE = ("mode", "step_kind", "rank", "process_steps", "process_updates")
_MODE_OF = {"process": "the process of the times, of `process_steps` and of `process_updates`"}
_ANY_RUN: Any = _Unknown()
_RANK = {"forward_device_median_ms": "the forward on the slowest device"}
_TREND = {
    "device": "`host`, or torch's name of a GPU",
    "low_bytes": "the 95% interval of `step_bytes` begins here; it ends at `high_bytes`",
    "lasts": "whether each third of the settled part of the run grows",
    "steps": "steps in the settled part",
    "added_bytes": "growth over the settled part",
    "matters": "whether this is a finding",
}
_WAITS = {"joined_steps": "steps compared with other ranks", "slowest": "how often the others waited for it"}
_DEVICE = {"called": "its name in torch", "throttled": "samples in which it was throttled, by reason"}
_CHECK = {"state": "`ok`, `warning` or `problem`", "remedy": "null if ok"}
_JSON = f"""\
## JSON of commands

`a[].b` is the member `b` of each object in the list `a`. `*` stands for any name, such as that of a phase. A member
without a meaning below is what its name says, is a field of a record, or is one of these:

- `steps`, `calls`: their number; of ranks, the steps of one and the calls of all
- `updates`: optimizer updates in these steps
- `open_calls`: calls in processes without a step so far: the end of a step is not known yet
- `steps_per_s`, `samples_per_s`, `tokens_per_s`: over the elapsed training time, steps of the slowest rank, and samples
  and [tokens](tracing.md#tokens) of all; with `_within_steps` without the time between steps
- `uncounted_steps`: steps without a sample count: for them, rates take the mean of the others
- `p95_ms`: the 95th percentile
- `device_median_ms`, `device_count`, `device_calls`: the median on the slowest device, and how often it is known
- `inputs`, `outputs`: typical sizes, as text
- `mode`: `dp`, `single`, `ddp` or `fsdp`
- `status`, `signal`: of the exit; null while the run is live
- `started_unix`: in seconds since 1970
- `schema`: the version of the object: 1. It changes if a member changes its meaning or is removed

### dpmon report --json

Times and rates leave evaluation steps out, unless a member says so.

- `run.id`, `.name`, `.directory`, `.script`, `.command[]`, `.cwd`, `.python`, `.started_unix`, `.versions.*`: the run
  and what was started; [secrets](getting-started.md#where-runs-are-kept) are `***`
- `end.state`, `.status`, `.signal`, `.error`, `.seconds`: how it ended, as in `dpmon ls`
- `processes[].process`, `.rank`, `.world`, `.pid`, `.python`, `.torch`: `world` is the number of ranks
- `steps`, `calls`, `updates`, `open_calls`
- `dropped`, `pruned`: records that were lost, and that were deleted because of their age
- `nothing`: why there is no step and no call
- `stalls[].since_s`, `.end_s`, `.text`: a [stall](stuck.md); its end is null if the run ended in it
- `modes[]`, `evaluations[]`: statistics by mode of the main kind of steps (usually training), and of other kinds, with
  the same members
{items("modes[].", [*_MODE, *rate_to_json(None), *members_of(mode_table(_ANY_RUN))], own=_MODE_OF)}
{items("modes[].phases.*.", [*members_of(PHASES), "count", "device_count"], "by phase; `count` steps had it")}
- `modes[].quantities.*.sum`, `.steps`: the total, and the number of steps with a value
- `elapsed.startup_s`, `.training_s`, `.evaluation_s`, `.forward_only_s`, `.between_s`, `.paused_s`, `.input_s`,
  `.stalled_s`, `.missed_s`, `.ending_s`: where the time went (`missed_s`: not recorded); means of ranks
- `elapsed.gaps[].process`, `.after_step`, `.t_s`, `.seconds`: the longest times between two steps
- `progress.epoch`, `.batch`, `.batches`, `.left_s`, `.error_s`, `.text`, `.absent.*`: the last
  [epoch](screen.md#progress), without the time left
- `profiles[].*`, `profiles[].operators[].*`: the newest records [`profile`](#profile)
{items("epochs[].", members_of(EPOCHS), "an epoch", _EPOCH)}
- `efficiency.text`, `.mfu`, `.hfu`, `.flops_per_s`, `.peak_flops_per_s`, `.reachable_flops_per_s`, `.dtype`,
  `.is_lower_bound`, `.absent.*`: [how good it is](how-good.md), of all ranks together
- `efficiency.joules_per_sample`: energy of the run's devices by its samples
- `efficiency.ranks[].process`, `.flops_per_s`: that of each
- `losses[].process`, `.place`, `.loss`, `.smoothed`, `.step`, `.t_s`, `.absent.*`: the newest
  [loss](tracing.md#losses) at a line that calls backward
- `losses[].points[].t_s`, `.values`, `.low`, `.mean`, `.high`, `.unfit`: a part of the run: numbers of finite and other
  (`unfit`) values, and the range of the finite ones
- `losses[].width_s`: length of these parts
{items("findings[].", Finding._fields, "[a finding](reports-and-exports.md#findings)", _FINDING)}
{items("replicas[].", members_of(REPLICAS), "a replica, its typical rows, and the time of its forward")}
- `sizes[].mode`, `.root`, `.device`, `.replica`, `.inputs`, `.outputs`, `.step_kind`, `.calls`, `.evaluations`: one
  of its sizes, and the calls with it
{items("ranks[].", [*members_of(RANKS), *rate_to_json(None)], own=_RANK)}
{items("ranks[].", rank_time_members(None), "means per step, or [per update](ddp.md#gradient-accumulation)", _WAITS)}
- `communication`: null if no ranks train together
- `communication.exposed_ms`, `.exposed_share`, `.wait_ms`, `.wait_share`, `.joined_steps`, `.missing`: means per step
  or update over the ranks, without the straggler's wait
- `communication.synced`, `.unsynced`: backward passes per step or update that average gradients, and others
- `communication.straggler`: the rank that the others wait for, or null
- `communication.straggler.process`, `.rank`, `.ranks[]`: `ranks` are all that are equally slow
- `communication.straggler.excess_ms`, `.share`, `.slowest`, `.steps`: its cost; in how many of the steps it was the
  slowest
- `communication.straggler.phase`, `.own_ms`, `.others_ms`, `.sentence`: the slow phase, here and on the others
- `communication.torch`: torch's own times of one iteration, or null
- `communication.torch.process`, `.iteration`, `.comm_ms`, `.overlap_ms`, `.absent.*`: as in the record [`ddp`](#ddp)
- `communication.sampled.samples`, `.one_in`, `.absent`: number of samples, and their interval
- `communication.sampled.operations[].name`, `.size`, `.collectives`, `.bytes`: `size` is the number of ranks
- `communication.wrappers[].*`: as in the record [`ddp`](#ddp)
{items("stages[].", members_of(STAGES))}
{items("devices[].", members_of(DEVICES), "a GPU over the run", _DEVICE)}
- `gpu_absent`: why there are no GPUs
- `host`: null with several nodes
- `host.samples`, `.cpu_median_pct`, `.mem_used_max_bytes`, `.mem_total_bytes`
- `host.cpus`, `.others_cpus`, `.run_cpus`, `.load`: CPU cores; medians of those in use by others and by the run
{items("memory[].", [*members_of(MEMORY), "absent"])}
- `memory[].known.*`: how many of the processes each sum covers
{items("memory_trends[].", [*MEMORY_TREND, *Growth._fields], "[growing memory](what-to-do.md#memory-grows)", _TREND)}
- `compared`: dp vs. single; null unless both ran
- `compared.speedup`, `.low`, `.high`, `.efficiency`: how many times faster dp is, its 95% interval, and per device
- `compared.outcome`, `.sentence`, `.missing`: `faster`, `slower` or `even`
- `compared.steps.*`: compared steps by mode
- `mode_changes[].process`, `.root`, `.t_s`, `.step`, `.mode`, `.requested_by`, `.devices[]`, `.virtual`, `.reason`,
  `.refused`: as in the record [`mode`](#mode)
- `pauses[].process`, `.step`, `.t_s`, `.seconds`, `.reason`, `.refused`, `.on`: `on` if it had not ended
- `paused.times`, `.seconds`, `.unended`, `.on`, `.alone_s`: all pauses; `unended` without a recorded end;
  `alone_s`: only some processes were paused
- `inputs[].process`, `.t_s`, `.seconds`: waits for a line of input
- `warnings[]`
- `time.width_s`: length of a part
- `time.stretches[].start_s`, `.end_s`, `.mode`, `.step_kind`, `.evaluation`, `.steps`, `.mean_ms`, `.longest_ms`,
  `.samples`, `.elapsed_ms`, `.parts_ms.*`: a part of the run: the steps that ended in it, and where their time went

### dpmon compare --json

- `schema`, `outcome`, `status`: the result in a sentence, and the exit status
- `pair`: whether there is one run on each side
- `per`: what times are divided by: `step` or `sample`
- `missing`: why steps are not compared, or have no interval
- `sides[].side`: `A` or `B`
- `sides[].spread`: how much slower its slowest run is than its fastest one (0.02: 2%)
- `sides[].runs[].id`, `.name`, `.directory`, `.steps`, `.straggler`: `steps` were compared
- `differences[].what`, `.a`, `.b`: what differs, and its value on both sides
- `most_changed.phase`, `.a`, `.b`: the phase that changed most in the direction of the step, in ms
- `figures.*.unit`: `ms`, `bytes`, `share` or `/s`
- `figures.*.a[]`, `.b[]`: the value of each run: mean time per step or sample (`step`), its part in a phase, in a
  phase on the slowest device (`*_device`), or `between` steps; `median_step`, `fast_step`, `cpu_step`;
  `samples_per_s`, `tokens_per_s`, `steps_per_s`, `mfu`, `flops_per_s`, `memory` (torch's peak), `host_memory`,
  `exposed`, `wait`,
  `evaluation_step`, `evaluation` (total), `startup`
- `figures.*.ratio`, `.low`, `.high`: `b` divided by `a`, and its 95% interval
- `figures.*.least`, `.most`: one-sided 95% bounds, which limits use
- `figures.*.missing`: why there is no ratio, or no interval
- `gate[].figure`, `.limit`: a metric, and its largest growth (0.05: 5%)
- `gate[].outcome`, `.text`: `slower`, `not slower` or `inconclusive`, and why

### dpmon try --json

- `schema`, `runs[]`: the names of the unchanged runs
- `absent.*`: the reason for each trial that is left out
- `trials[].trial`, `.changes`, `.runs[]`: its name, what it changes, its runs
- `trials[].figure`: `step` or `samples_per_s`
- `trials[].saves`: the largest share of step time that it can save, or null
- `trials[].ratio`, `.low`, `.high`, `.least`, `.most`: changed runs divided by unchanged ones, as in `dpmon compare`

### dpmon ls --json

An object per line for each run, the newest last.

{items("", ListedRun._fields, own=_LISTED_RUN)}

### dpmon status --json

With `--all`, `schema` and `runs[]`. It has the members of a line of [`dpmon --json`](#dpmon---json) and these:

- `schema`, `name`
- `stall`: the stall that the run is in, or ended in, or null
- `stall.since_s`, `.lasted_s`, `.text`, `.ranks[].*`: as in the record [`stall`](#stall)
- `findings[].{"`, `.".join(Finding._fields)}`: the three most important
- `exit.status`, `.signal`, `.seconds`: null while the run is live
- `explanation[]`: with `--explain`: its lines

### dpmon why --json

- `run`, `state`: as in `dpmon ls`
- `cause`: the first exception, with its line; null if unknown, or if the run did not fail
- `frames[][]`: function, file and line of the innermost calls of its traceback, innermost first
- `now`: what each rank does now; null if the run has ended or is on another node
- `now.t_s`, `.since_s`, `.text`: the time, the start of the stall, where each rank is
- `now.without[]`: on several nodes: each node that did not answer, and why
- `now.ranks[].*`: as in the record [`stall`](#stall)
- `now.ranks[].stacks[].thread`, `.main`, `.left_out`, `.frames[]`: the stack of a thread: function, file and line (0:
  C code) of each frame, innermost first; `left_out` is the number of further frames
- `stalls[].since_s`, `.end_s`, `.text`: every stall of the run; its end is null if it continues
- `stalls[].ranks[].*`: as in the record [`stall`](#stall)
- `explanation[]`: the lines of `dpmon status --explain`, if the run is live and not stalled

### dpmon profile --json

The record [`profile`](#profile).

### dpmon doctor --json

- `state`: the worst of the checks
{items("checks[].", Check._fields, own=_CHECK)}

### dpmon --json

An object per line. `kind` is `status`; `message`, with a `text` of dpmon; or, in the last line, `exit`, with `run`,
`t_s`, `status` and `signal`. `skipped` is the number of lines before it that nobody read in time. A `status` has:

- `run`, `t_s`, `state`
{items("health.", Health("", None).fields(), _HEALTH_STATE, _HEALTH)}
- `process`, `rank`: the process of the members below, except the rates
- `step`, `step_kind`, `mode`, `virtual`: its last training step; without training, its last step
- `steps`, `updates`: its training steps so far
- `steps_per_s`, `samples_per_s`, `tokens_per_s`, `steps_per_s_within_steps`, `samples_per_s_within_steps`,
  `uncounted_steps`
- `step_ms.median_ms`, `.p95_ms`: over the last two minutes of training steps in this mode
- `phases.*.share`, `.median_ms`, `.p95_ms`, `.device_median_ms`: of the same steps
- `call_phases.*.share`, `.median_ms`, `.p95_ms`, `.device_median_ms`: of their calls, within the forward
- `quantities.*.sum`, `.steps`: the total, and the number of steps with a value
- `progress.epoch`, `.batch`, `.batches`, `.left_s`, `.error_s`, `.text`, `.absent.*`: the
  [epoch](screen.md#progress), the time left and its uncertainty
- `efficiency.*`, `efficiency.absent.*`, `efficiency.ranks[].*`: as in the report, over the last ten seconds of training
- `losses[].place`, `.loss`, `.smoothed`, `.step`, `.t_s`, `.absent.*`: as in the report
- `processes`: number of training processes
- `nodes[].number`, `.name`, `.state`, `.trouble`: with several nodes: the connection (connecting, connected, cut,
  refused, ended), and why records do not arrive
- `ranks[].progress.*`: of each rank, without the time left
- `ranks[].*`, `communication.*`: with several ranks: means of the last 50 steps, at least 5 s, as in the report
- `memory_trends[].*`: as in the report
- `devices[].*`, `host.*`: the newest records [`device`](#device) and [`host`](#host)
- `warnings`, `dropped`: number of warnings and of lost records
- `absent.*`

### Events

The object that [a command for events](stuck.md#events) gets on its standard input.

- `specversion`, `datacontenttype`: always `1.0` and `application/json`
- `id`: the run, the type, and what distinguishes it from other events of this type; it never changes
- `source`, `subject`: the node, and the id of the run
- `type`, `time`: what happened, and when; for `alive` and findings, when the command was started
- `data.run`, `.name`, `.script`, `.text`
- `data.health.*`: as in a line of `dpmon --json`
- `data.since_s`, `.ranks[].*`: of a stall: its start, and what each rank does, as in the record [`stall`](#stall)
- `data.lasted_s`: of `resumed`: how long the stall lasted
- `data.{"`, `.".join(name for name in Finding._fields if name != "text")}`: of a finding
- `data.end`: of `ended` and `failed`: as in `dpmon ls`
"""


def reference() -> str:
    """Return the text of docs/records.md."""
    common = _common_fields()
    records = [_record(kind, common) for kind in RECORDS.values()]
    head = _HEAD, _lines(map(_field, common.values()))
    return "\n".join([*head, *records, _PHASES, _phases(), _QUANTITIES, _quantities(), _JSON])


if __name__ == "__main__":
    print(reference(), end="")

"""Panel 2: the input, output and time of each replica of the last call, or of each stage of a split model."""

from __future__ import annotations

from typing import NamedTuple

from dpmon.cleaning import clean
from dpmon.model.state import CallTrack, Process
from dpmon.record.kinds import Call, Replica, Size, rows_of
from dpmon.text.cells import cut, right, span_width, wrapped
from dpmon.text.quantities import UNKNOWN, count_of, duration, group, memory
from dpmon.ui.chart import bar, range_bar
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, fit
from dpmon.ui.scene import NAMES, Scene, mode_words


class CallChoice(NamedTuple):
    """One choice of the panel: a root, or one of several calls of a root in each step."""

    track: CallTrack
    nth: int
    of: int


_RANGE = "5 to 95 %"
_FRESH = 64
"""A call that was not seen for more than this many steps can no longer be chosen."""


def choices(process: Process | None) -> list[CallChoice]:
    """All choices, in an order that stays the same while roots take turns."""
    found: list[CallChoice] = []
    for _, track in sorted(process.calls.items(), key=lambda item: (item[0][0], item[0][1] or "")) if process else ():
        parts = [part for part in track.parts if part.last.step >= track.last.step - _FRESH]
        if len(parts) > 1:
            found += [CallChoice(part, nth, len(parts)) for nth, part in enumerate(parts, 1)]
        else:
            found.append(CallChoice(track, 1, 1))
    return found


def chosen(scene: Scene) -> tuple[CallChoice | None, int, int]:
    """The current choice, its number from 1 (0: always the root called last), and the number of choices."""
    process = scene.process
    if process is None or process.newest is None:
        return None, 0, 0
    all_of_them = choices(process)
    count = len(all_of_them)
    if scene.view.root and count > 1:
        index = (scene.view.root - 1) % count
        return all_of_them[index], index + 1, count
    return CallChoice(process.calls[process.newest], 1, 1), 0, count


def shown(scene: Scene) -> CallTrack | None:
    """The root that the panel shows: the one called last, or the one that the user chose."""
    choice = chosen(scene)[0]
    return choice.track if choice is not None else None


def _staged(call: Call) -> bool:
    """Whether the model of the call is split over several devices."""
    return not call.replicas and len(call.devices) > 1 and call.mode != "dp"


def wanted_rows(scene: Scene) -> int:
    """Rows that the whole content needs."""
    track = shown(scene)
    if track is None:
        return 3
    call = track.last
    return len(call.stages) + 2 if _staged(call) else max(len(call.devices), len(call.replicas), 1) + 1


def title(scene: Scene, look: Look) -> tuple[Row, Row]:
    """The panel's title, and its main number."""
    choice, which, count = chosen(scene)
    if choice is None:
        return [(NAMES["replicas"], "title")], []
    call = choice.track.last
    dot = f" {look.glyphs.middot} "
    name = f"{dot}{clean(call.root, 60)}{dot}{clean(call.via, 40) if call.via else 'bare module'}"
    part = f"{dot}call {choice.nth} of {choice.of} a step" if choice.of > 1 else ""
    many = f"{dot}newest of {count}" if count > 1 and not which else f"{dot}{which} of {count}" if which else ""
    corner: Row = [("call", "dim"), (right(group(call.call), 9), "")]
    head = "2 Stages" if _staged(call) else NAMES["replicas"]
    # The names come last, so that they are cut before the number of the choice.
    return [(head, "title"), (many + part, ""), *kind(call, look), (name, "")], corner


def kind(call: Call, look: Look) -> Row:
    """A mark for a call of an evaluation, without gradients or in eval mode; empty for training."""
    word = "evaluation" if call.evaluates else "no gradients" if not call.grad else "" if call.training else "eval mode"
    return [(f" {look.glyphs.middot} ", ""), (word, "wait")] if word else []


def table(scene: Scene, width: int, height: int, look: Look) -> list[Row]:
    """The panel's rows, inside its frame: a header, a row per replica, idle devices, missing values and why."""
    track = shown(scene)
    if track is None:
        return [[(scene.empty_reason("no call was traced", "no call yet"), "dim")]]
    call = track.last
    staged = _staged(call)
    rows = _stages(track, width, look) if staged else _replicas(track, width, height, look)
    if call.failed:
        rows.append([("the forward raised an exception", "bad")])
    for reason in call.absent.values():
        lines = wrapped(clean(reason, 300), width, None if staged else 1, look.glyphs.more)
        rows += [[(line, "dim")] for line in lines]
    process = scene.process
    if process is not None and call.virtual and len(rows) < height:
        shared = "one GPU" if any(device.startswith("cuda") for device in call.devices) else "this machine's processor"
        rows.append([(f"virtual: the replicas share {shared}", "dim")] if process.mode == "dp" else [])
    return rows


def _replicas(track: CallTrack, width: int, height: int, look: Look) -> list[Row]:
    """A header, a row per replica, and idle devices."""
    drawn = _ReplicaTable(track, width, look)
    rows: list[Row] = [drawn.header()] if height > 1 else []
    rows += [drawn.row(replica) for replica in track.last.replicas]
    rows += _idle(track.last, look)
    return rows if track.last.replicas else [*rows, [("the replicas of this call were not seen", "dim")]]


def _stages(track: CallTrack, width: int, look: Look) -> list[Row]:
    """A header, and a row per stage with its incoming tensors and its time."""
    call = track.last
    more = look.glyphs.more
    device = min(max([span_width(clean(s.device, 20)) for s in call.stages] + [6]), 10)
    ins = [size_text(stage.inputs) for stage in call.stages]
    outs = [size_text(stage.outputs) for stage in call.stages]
    names = [clean(", ".join(stage.parts), 200) for stage in call.stages]
    room = max(width - 3 - device - 2 - 10 - 10 - 4 - (10 if track.device_ns else 0), 18)
    given = min(max(map(span_width, [*ins, "input"])), room // 3)
    gave = min(max(map(span_width, [*outs, "output"])), room // 3)
    parts = min(max(map(span_width, [*names, "parts"])), room - given - gave)
    rows: list[Row] = [
        [
            (" # ", "dim"),
            ("device".ljust(device) + "  ", "dim"),
            *fit([("parts", "dim")], parts + 2, more),
            *fit([("input", "dim")], given + 2, more),
            *fit([("output", "dim")], gave, more),
            ("   crossed", "dim"),
            (" host time", "dim"),
            (" on device" if track.device_ns else "", "dim"),
        ]
    ]
    for stage, got, result, name in zip(call.stages, ins, outs, names, strict=True):
        rows.append(
            [
                (right(str(stage.stage), 2) + " ", "bold"),
                *fit([(clean(stage.device, 20), "")], device + 2, more),
                *fit([(cut(name, parts, more), "")], parts + 2, more),
                *fit([(cut(got, given, more), "")], given + 2, more),
                *fit([(cut(result, gave, more), "")], gave, more),
                (right("" if stage.stage == 0 else memory(stage.crossed), 10), ""),
                (right(host_time(track, stage.stage), 10), "bold"),
                (right(device_time(track, stage.stage), 10) if track.device_ns else "", "bold"),
            ]
        )
    if not call.stages:
        rows.append([("no stage of this call was seen", "dim")])
    return rows


class _ReplicaTable:
    """Columns. Their widths depend on the panel's width, on the last call, and on which times are known."""

    def __init__(self, track: CallTrack, width: int, look: Look) -> None:
        self.track, self.look, self.width = track, look, width
        call = track.last
        self.device = min(max([span_width(clean(d, 20)) for d in call.devices] + [6]), 10)
        texts = [size_text(r.inputs) for r in call.replicas] + ["input"]
        outs = [size_text(r.outputs) for r in call.replicas] + ["output"]
        # Number, device, rows, times and gaps have fixed widths. Sizes get the rest; drawings get what the sizes leave.
        self.on_device = bool(track.device_ns)
        fixed = 3 + self.device + 2 + 2 + 6 + 10 + (10 if self.on_device else 0)
        room = max(width - fixed, 12)
        self.input = min(max(span_width(t) for t in texts), max(room * 3 // 5, room - max(map(span_width, outs))))
        self.output = min(max(span_width(t) for t in outs), room - self.input)
        left = room - self.input - self.output - 3  # a gap before the bar, two before the spread
        self.bar = min(left * 2 // 5, 16) if left * 2 // 5 >= len("share") else 0
        self.spread = min(left - self.bar, 20) if left >= len("spread") else 0
        known = [spread for spread in track.times if spread is not None]
        self.top = max((spread.high for spread in known), default=0.0)
        # The scale ends at the slowest replica. It starts at the fastest, unless that would magnify noise.
        self.base = min([spread.low for spread in known] + [self.top * 0.7])
        self.rows_total = call.rows

    def header(self) -> Row:
        return [
            (" # ", "dim"),
            ("device".ljust(self.device) + "  ", "dim"),
            ("input".ljust(self.input) + "  ", "dim"),
            ("output".ljust(self.output), "dim"),
            ("  rows", "dim"),
            ((" " + "share".ljust(self.bar)) if self.bar else "", "dim"),
            (" host time", "dim"),
            (" on device" if self.on_device else "", "dim"),
            (("  " + self._scale()) if self.spread else "", "dim"),
        ]

    def _scale(self) -> str:
        """The scale of the last column: the times at its edges, with its title between them if it fits.

        The right edge is the 95th percentile of the slowest replica.
        """
        begin, end = (duration(self.base, ""), duration(self.top, "")) if self.top else ("", "")
        room = self.spread - len(begin) - len(end)
        if self.top and room >= 1:
            between = next(word for word in (_RANGE, "5-95%", "") if len(word) + 2 <= max(room, 2))
            return begin + between.center(room) + end
        number = begin.rstrip("nµms")
        unit = begin[len(number) :]
        if self.top and end.endswith(unit) and len(f"{number}-{end}") <= self.spread:
            return f"{number}-{end}".rjust(self.spread)
        return (_RANGE if self.spread >= len(_RANGE) else "spread").ljust(self.spread)

    def row(self, replica: Replica) -> Row:
        look = self.look
        count = rows_of(replica.inputs, self.track.last.dim)
        share = count / self.rows_total if count is not None and self.rows_total else None
        times = self.track.times[replica.replica] if replica.replica < len(self.track.times) else None
        spread = ""
        if self.spread:
            drawn = " " * self.spread
            if times is not None:
                drawn = range_bar(*times[:3], self.top, self.spread, look.glyphs, self.base)
            spread = "  " + drawn
        return [
            (right(str(replica.replica), 2) + " ", "bold"),
            *fit([(clean(replica.device, 40), "")], self.device + 2, look.glyphs.more),
            *fit([(size_text(replica.inputs), "")], self.input, look.glyphs.more),
            ("  ", ""),
            *fit([(size_text(replica.outputs), "")], self.output, look.glyphs.more),
            (right(UNKNOWN if count is None else str(count), 6), ""),
            *([(" ", ""), *bar(share, self.bar, look.glyphs)] if self.bar else []),
            (right(host_time(self.track, replica.replica), 10), "bold"),
            (right(device_time(self.track, replica.replica), 10) if self.on_device else "", "bold"),
            (spread, "bar"),
        ]


def host_time(track: CallTrack, index: int) -> str:
    """The median host time of a replica or stage."""
    times = track.times[index] if index < len(track.times) else None
    return duration(None if times is None else times.middle)


def device_time(track: CallTrack, index: int) -> str:
    """The median device time of a replica or stage."""
    return duration(track.device_ns.get(index))


def size_text(sizes: tuple[Size, ...] | None) -> str:
    """The first size and the number of others: "[16, 512] +2"; clean."""
    if sizes is None:
        return UNKNOWN
    if not sizes:
        return "none"
    first = _shape(sizes[0], 12)
    return first if len(sizes) == 1 else f"{first} +{len(sizes) - 1}"


def every_size(
    inputs: tuple[Size, ...] | None, outputs: tuple[Size, ...] | None, width: int, look: Look, unseen: str = "not seen"
) -> list[Row]:
    """One row per input or output size."""
    rows: list[Row] = []
    for word, sizes in (("in ", inputs), ("out", outputs)):
        if sizes is None:
            rows.append([(f"   {word}  {UNKNOWN}  {unseen}", "dim")])
        for size in sizes or ():
            rows.append([(f"   {word}  ", "dim"), (cut(_size_line(size), width - 8, look.glyphs.more), "")])
    return rows


def _size_line(size: Size) -> str:
    """Everything about one size: "0.mask [16, 512] float32 32.0 KiB"; clean."""
    name = clean(size.path, 80) + " " if size.path else ""
    return f"{name}{_shape(size, 32)} {clean(size.dtype, 20)} {memory(size.bytes)}"


def _shape(size: Size, most: int) -> str:
    """The shape of this rank's tensor, at most `most` dimensions: "[8, 512]"; for a DTensor "[8, 512] of [16, 512]"."""
    shapes = (size.shape,) if size.global_shape is None else (size.shape, size.global_shape)
    return " of ".join("[" + ", ".join(str(extent) for extent in shape[:most]) + "]" for shape in shapes)


def _idle(call: Call, look: Look) -> list[Row]:
    """A row for each device that received nothing, with the reason."""
    if call.mode != "dp":
        return []
    used = len(call.replicas)
    rows = call.rows
    why = f"idle: a batch of {rows} makes {used} chunks" if rows is not None else f"idle: {used} chunks"
    return [
        [(right(str(i), 2) + " ", "dim"), (clean(device, 20) + "  ", "dim"), (why, "wait")]
        for i, device in enumerate(call.devices[used:], used)
    ]


def _what_times(track: CallTrack) -> str:
    """A sentence about the host times: how many calls they cover, their range, and how they differ from apply."""
    known = [spread for spread in track.times if spread is not None]
    if not known:
        return ""
    calls = max(spread.calls for spread in known)
    low, high = min(spread.low for spread in known), max(spread.high for spread in known)
    spread_note = (
        f"host time: each replica's own forward, the median of {count_of(calls, 'call')}; 5th to 95th percentile:"
    )
    spread_note += f" {duration(low)} to {duration(high)}"
    return (
        spread_note + "; apply, in panels 3 and 4, lasts until the slowest is done"
        if len(track.times) > 1
        else spread_note
    )


def zoomed(scene: Scene, width: int, height: int, look: Look) -> list[Row]:
    """The panel at full size: the table, then every size of every replica or stage by its path."""
    rows = table(scene, width, height, look)
    track = shown(scene)
    if track is None:
        return rows
    rows.append([])
    if not _staged(track.last):
        mode, where = mode_words(scene.process, look.glyphs.times)
        rows.append([(f"mode {mode}  {where}", "dim")])
        rows += [[(line, "dim")] for line in wrapped(_what_times(track), width)]
        rows.append([])
    for replica in track.last.replicas:
        rows.append([(f"{right(str(replica.replica), 2)} {clean(replica.device, 40)}", "bold")])
        rows += every_size(replica.inputs, replica.outputs, width, look, "not seen by a forward hook")
    for stage in track.last.stages:
        names = clean(", ".join(stage.parts), max(width - 20, 10))
        rows.append([(f"{right(str(stage.stage), 2)} {clean(stage.device, 40)}  ", "bold"), (names, "")])
        rows += every_size(stage.inputs, stage.outputs, width, look)
    return rows

"""The plan of a run as a table for people, in lines of at most 80 characters.

part          cards  shares   GiB each
trainer/0–3   0–3    alone         8.5
  weights 0.5, gradients 0.5, optimizer 0.9, activations 5.7, libraries 1.0
engine/0–3    4–7    alone        56.8
  weights 1.8, KV cache 54.0, libraries 1.0
most in use on a card: 56.8 of 80 GiB; each engine runs 512 sequences of 8192 tokens at once
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from headway.config import ResolvedConfig
from headway.placement.component_places import ComponentPlace, format_numbers
from headway.placement.memory_model import GIB
from headway.placement.placement import Placement

_WIDTH = 80


def describe_plan(resolved: ResolvedConfig, placement: Placement) -> list[str]:
    """Return the lines of the table, what it comes to, and the notes of the plan."""
    lines = [_describe_machine(placement), *_make_rows(placement)]
    if placement.budget is not None:
        lines += _wrap(_describe_budget(resolved, placement))
    elif placement.device == "cuda":
        model = resolved.config.actor_train.model_args.model_name_or_path or resolved.config.pretrain
        unknown = f"the shape of {model} is not known here" if model else "no model is named (pretrain)"
        if not placement.machine.gpu_memory_gib:
            unknown = "the memory of the cards is not known"
        lines += _wrap(f"memory is not planned: {unknown}")
    for note in placement.notes:
        lines += _wrap(f"note: {note}")
    return lines


def _describe_machine(placement: Placement) -> str:
    machine, how = placement.machine, "processes" if placement.processes else "threads of one process"
    if placement.cluster is not None:
        how = "actors of Ray"
    if placement.device == "cpu" and placement.cluster is not None:
        return f"{machine.nodes} node{'s' if machine.nodes > 1 else ''} × {machine.devices} CPU slots: {how}"
    if placement.device == "cpu":
        shared = f", {machine.devices} logical devices" if machine.is_virtual else ""
        return f"CPU with {machine.cores} cores{shared}: {how}"
    cards = f"{machine.gpus * machine.nodes} GPU{'s' if machine.gpus * machine.nodes > 1 else ''}"
    cards += f" × {machine.gpu_memory_gib:.4g} GiB" if machine.gpu_memory_gib else ""
    cards += f" on {machine.nodes} nodes" if machine.nodes > 1 else ""
    cards += f", {machine.devices} logical devices a node" if machine.is_virtual else ""
    return f"{cards}: {how}"


def _make_rows(placement: Placement) -> Iterator[str]:
    """Yield a line for each kind of component, one for what its memory is for, and one for idle cards."""
    groups: dict[tuple[str, str, float | None, bool], list[ComponentPlace]] = {}
    for place in placement.places.values():
        kind = place.name.rstrip("0123456789").rstrip("/") if _get_number(place) is not None else place.name
        groups.setdefault((kind, place.sharing, place.memory_gib, place.sleeps), []).append(place)
    on_gpu = placement.device == "cuda"
    yield f"{'part':<22}{'cards' if on_gpu else 'devices':<12}{'shares':<27}{'threads':>8}{'GiB each':>10}".rstrip()
    for (kind, sharing, memory, sleeps), places in groups.items():
        numbers = [number for place in places if (number := _get_number(place)) is not None]
        name = f"{kind}/{format_numbers(numbers)}" if numbers else kind
        where = sorted({number for place in places for number in (place.cards if on_gpu else place.devices)})
        how = {"alone": "alone", "turns": "takes turns", "overlap": "overlaps"}[sharing]
        how += (", sleeps" if kind == "engine" else ", moments leave") if sleeps else ""
        need = "" if memory is None else f"{memory:.1f}"
        cards = format_numbers(where) if where else "elsewhere"
        yield f"{name:<22}{cards:<12}{how:<27}{places[0].threads:>8}{need:>10}".rstrip()
        needs = placement.budget.needs[places[0].name] if placement.budget is not None else {}
        shown = {name.replace("KV", "KV cache"): size / GIB for name, size in needs.items() if size > GIB / 20}
        order = sorted(shown, key=lambda purpose: purpose == "libraries")
        parts = ", ".join(f"{purpose} {shown[purpose]:.1f}" for purpose in order)
        yield from textwrap.wrap(parts, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    if placement.idle_cards and on_gpu:
        yield f"{'idle':<22}{format_numbers(placement.idle_cards)}"


def _get_number(place: ComponentPlace) -> int | None:
    last = place.name.rpartition("/")[2]
    return int(last) if last.isdigit() and "/" in place.name else None


def _describe_budget(resolved: ResolvedConfig, placement: Placement) -> str:
    budget, derived = placement.budget, resolved.derived
    assert budget is not None
    text = f"most in use on a card: {max(budget.peaks_gib.values()):.1f} of {placement.machine.gpu_memory_gib:.4g} GiB"
    if budget.sequences:
        text += f"; each engine runs {budget.sequences} sequences of {derived.sequence_length} tokens at once"
        if budget.sequences < budget.wanted_sequences:
            text += f", and more while they are shorter: up to {budget.wanted_sequences} are in flight"
    return text


def _wrap(text: str) -> Sequence[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)

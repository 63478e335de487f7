// Turns the curves of the chosen runs into lines: one colour a run or a curve, smoothed, or as bands over seeds.

import type { Chart, Curves } from "./api";
import type { Axis, Line, Plot } from "./charts";
import { store } from "./store";

export interface CurveOptions {
  axis: Axis;
  smooth: number;
  bands: boolean;
}

export function makePlot(chart: Chart, options: CurveOptions): Plot | null {
  const runs = store.chosen.filter((run) => store.curves.has(run));
  const many = runs.length > 1;
  const lines: Line[] = [];
  if (many && options.bands) {
    for (const members of groupBySeed(runs)) lines.push(...makeBand(chart, members, options));
  } else {
    for (const run of runs) {
      const curves = chart.curves.flatMap(([name, label]) => expand(store.curves.get(run)!, name, label));
      const shown = many && chart.kind !== "bars" ? curves.slice(0, 1) : curves;
      shown.forEach(([name, label], place) => lines.push(...makeLines(run, name, label, place, many, options)));
    }
  }
  if (chart.kind === "reward")
    for (const members of many && options.bands ? groupBySeed(runs) : runs.map((run) => [run])) lines.push(...makeHeldOut(members, many, options));
  if (!lines.some((line) => line.y.some((value) => value !== null && value !== 0))) return null;
  if (chart.kind === "lag" && !many) lines.push(...makeBound(runs, options));
  const marks = many ? [] : (store.curves.get(runs[0])?.resumed ?? []).map(([step, time]) => (options.axis === "time" ? time : placeStep(runs[0], step, options.axis)));
  return {
    title: chart.title,
    note: chart.note,
    lines,
    axis: options.axis,
    stacked: chart.kind === "bars",
    fromZero: chart.from_zero,
    marks,
  };
}

function expand(curves: Curves, name: string, label: string): [string, string][] {
  if (!name.endsWith("/")) return name in curves.series ? [[name, label]] : [];
  const found = Object.keys(curves.series).filter((one) => one.startsWith(name)).sort();
  return found.map((one) => [one, `${label} ${one.slice(name.length).replaceAll("_", " ")}`.trim()]);
}

// Returns where each step of a run lies on the x axis. Samples and tokens are counted from what each step has trained.
function makeX(run: string, axis: Axis): number[] {
  const curves = store.curves.get(run)!;
  if (axis === "step") return curves.step;
  if (axis === "time") return curves.time;
  const counts = Object.keys(curves.series).filter((name) => name.startsWith("lag_samples/")).map((name) => curves.series[name]);
  const lengths = curves.series["response/length"];
  let sum = 0;
  return curves.step.map((_, place) => {
    const samples = counts.reduce((total, column) => total + (column[place] ?? 0), 0);
    sum += axis === "samples" ? samples : samples * (lengths?.[place] ?? 0);
    return sum;
  });
}

// Returns where the end of a step lies on the x axis; before the first step that is 0.
function placeStep(run: string, step: number, axis: Axis): number {
  if (axis === "step") return step;
  const place = store.curves.get(run)!.step.findLastIndex((one) => one <= step);
  return place < 0 ? 0 : makeX(run, axis)[place];
}

function makeLines(run: string, name: string, label: string, place: number, many: boolean, options: CurveOptions): Line[] {
  const curves = store.curves.get(run)!;
  const x = makeX(run, options.axis);
  const y = curves.series[name];
  const palette = store.palette();
  const color = many ? store.color(run) : palette[place % palette.length];
  const text = many ? store.heads.get(run)!.name : label;
  if (options.smooth < 2) return [{ label: text, color, x, y }];
  const smoothed: Line = { label: text, color, x, y: smooth(y, options.smooth), width: 2.25 };
  return [{ label: many ? `${text}, each step` : "each step", color, x, y, width: 1, faint: true }, smoothed];
}

// What validations found: of one run, or of runs that differ only in their seed as a mean with its band.
function makeHeldOut(members: string[], many: boolean, options: CurveOptions): Line[] {
  const names = ["reward/held_out", "reward/held_out_mixed"];
  const all = members.flatMap((run) => store.curves.get(run)!.held_out);
  const name = names.find((one) => all.some((row) => one in row.values));
  if (!name) return [];
  const found = new Map<number, number[]>();
  for (const row of all) if (name in row.values) found.set(row.step, [...(found.get(row.step) ?? []), row.values[name]]);
  const steps = [...found.keys()].sort((one, other) => one - other);
  const first = store.curves.get(members[0])!.held_out;
  const time = (step: number) => first.find((row) => row.step === step)?.time ?? placeStep(members[0], step, "time");
  const rows = steps.map((step) => found.get(step)!);
  const label = name.endsWith("mixed") ? "held-out (mixed versions)" : "held-out";
  const isBand = members.length > 1;
  return [
    {
      label: many ? `${nameFamily(members)}, ${label}` : label,
      color: many ? store.color(members[0]) : store.palette()[1],
      x: steps.map((step) => (options.axis === "time" ? time(step) : placeStep(members[0], step, options.axis))),
      y: rows.map((row) => row.reduce((sum, one) => sum + one, 0) / row.length),
      low: isBand ? rows.map((row) => Math.min(...row)) : undefined,
      high: isBand ? rows.map((row) => Math.max(...row)) : undefined,
      points: true,
      dash: [5, 4],
    },
  ];
}

function nameFamily(members: string[]): string {
  const name = store.heads.get(members[0])!.name;
  return members.length > 1 ? `${name.replace(/[-_. ]?(seed)?[-_. ]?\d+$/, "") || name}, ${members.length} seeds` : name;
}

function makeBound(runs: string[], options: CurveOptions): Line[] {
  const curves = store.curves.get(runs[0]);
  const alpha = store.heads.get(runs[0])?.alpha ?? null;
  if (!curves?.step.length || alpha === null) return [];
  const xs = makeX(runs[0], options.axis);
  const bound = Math.ceil(alpha);
  return [{ label: "bound ⌈α⌉", color: store.dark ? "#b0b7c3" : "#6b6b6b", x: [xs[0], xs[xs.length - 1]], y: [bound, bound], dash: [6, 4], width: 1.25 }];
}

// Runs that differ only in their seed belong together.
export function groupBySeed(runs: string[]): string[][] {
  const found = new Map<string, string[]>();
  for (const run of runs) {
    const family = store.heads.get(run)?.family || run;
    found.set(family, [...(found.get(family) ?? []), run]);
  }
  return [...found.values()];
}

function makeBand(chart: Chart, members: string[], options: CurveOptions): Line[] {
  const name = chart.curves[0][0];
  const tables = members.map((run) => store.curves.get(run)!).filter((curves) => name in curves.series);
  if (!tables.length) return [];
  const first = makeX(members[0], options.axis);
  const places = new Map(store.curves.get(members[0])!.step.map((step, place) => [step, first[place]]));
  const steps = [...new Set(tables.flatMap((curves) => curves.step))].filter((step) => options.axis === "step" || places.has(step)).sort((one, other) => one - other);
  const columns = tables.map((curves) => {
    const known = new Map(curves.step.map((step, place) => [step, curves.series[name][place]]));
    return smooth(steps.map((step) => known.get(step) ?? null), options.smooth);
  });
  const rows = steps.map((_, place) => columns.map((column) => column[place]).filter((one): one is number => one !== null));
  return [
    {
      label: nameFamily(members),
      color: store.color(members[0]),
      x: options.axis === "step" ? steps : steps.map((step) => places.get(step)!),
      y: rows.map((row) => (row.length ? row.reduce((sum, one) => sum + one, 0) / row.length : null)),
      low: members.length > 1 ? rows.map((row) => (row.length ? Math.min(...row) : null)) : undefined,
      high: members.length > 1 ? rows.map((row) => (row.length ? Math.max(...row) : null)) : undefined,
      width: 2.25,
    },
  ];
}

// The mean of the last steps, at each step.
function smooth(values: (number | null)[], window: number): (number | null)[] {
  if (window < 2) return values;
  let sum = 0;
  const kept: number[] = [];
  return values.map((value) => {
    if (value === null) return null;
    kept.push(value);
    sum += value;
    if (kept.length > window) sum -= kept.shift()!;
    return sum / kept.length;
  });
}

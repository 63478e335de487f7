// Turns the curves of the chosen runs into lines: one colour a run or a curve, smoothed, or as bands over seeds.

import type { Chart, Curves } from "./api";
import type { Line, Plot } from "./charts";
import { store } from "./store";

export interface CurveOptions {
  axis: "step" | "time";
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
  if (chart.kind === "reward") for (const run of runs) lines.push(...makeHeldOut(run, many, options));
  if (!lines.some((line) => line.y.some((value) => value !== null && value !== 0))) return null;
  if (chart.kind === "lag" && !many) lines.push(...makeBound(runs, options));
  const marks = many ? [] : (store.curves.get(runs[0])?.resumed ?? []).map((one) => one[options.axis === "step" ? 0 : 1]);
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

function makeLines(run: string, name: string, label: string, place: number, many: boolean, options: CurveOptions): Line[] {
  const curves = store.curves.get(run)!;
  const x = options.axis === "step" ? curves.step : curves.time;
  const y = curves.series[name];
  const palette = store.palette();
  const color = many ? store.color(run) : palette[place % palette.length];
  const text = many ? store.heads.get(run)!.name : label;
  if (options.smooth < 2) return [{ label: text, color, x, y }];
  const smoothed: Line = { label: text, color, x, y: smooth(y, options.smooth), width: 2.25 };
  return many ? [smoothed] : [{ label: "each step", color, x, y, width: 1, faint: true }, smoothed];
}

function makeHeldOut(run: string, many: boolean, options: CurveOptions): Line[] {
  const rows = store.curves.get(run)!.held_out;
  const name = ["reward/held_out", "reward/held_out_mixed"].find((one) => rows.some((row) => one in row.values));
  if (!name) return [];
  const known = rows.filter((row) => name in row.values).sort((one, other) => one.step - other.step);
  const label = name.endsWith("mixed") ? "held-out (mixed versions)" : "held-out";
  return [
    {
      label: many ? `${store.heads.get(run)!.name}, ${label}` : label,
      color: many ? store.color(run) : store.palette()[1],
      x: known.map((row) => (options.axis === "step" ? row.step : row.time)),
      y: known.map((row) => row.values[name]),
      points: true,
      dash: [5, 4],
    },
  ];
}

function makeBound(runs: string[], options: CurveOptions): Line[] {
  const curves = store.curves.get(runs[0]);
  const alpha = store.heads.get(runs[0])?.alpha ?? null;
  if (!curves?.step.length || alpha === null) return [];
  const xs = options.axis === "step" ? curves.step : curves.time;
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
  const steps = [...new Set(tables.flatMap((curves) => curves.step))].sort((one, other) => one - other);
  const columns = tables.map((curves) => {
    const known = new Map(curves.step.map((step, place) => [step, curves.series[name][place]]));
    return smooth(steps.map((step) => known.get(step) ?? null), options.smooth);
  });
  const rows = steps.map((_, place) => columns.map((column) => column[place]).filter((one): one is number => one !== null));
  const head = store.heads.get(members[0])!;
  return [
    {
      label: members.length > 1 ? `${head.name.replace(/[-_. ]?(seed)?[-_. ]?\d+$/, "") || head.name}, ${members.length} seeds` : head.name,
      color: store.color(members[0]),
      x: steps,
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

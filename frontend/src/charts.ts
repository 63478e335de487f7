// Charts over steps or time, drawn by uPlot: lines, bands over seeds, stacked bars, and several runs over each other.

import uPlot from "uplot";
import { formatClock, formatDuration, formatNumber, formatTicks, h, TIME_STEPS } from "./dom";
import { saveCsv, savePng } from "./download";
import { store } from "./store";

export type Axis = "step" | "time" | "samples" | "tokens";
const AXIS_LABELS: Record<Axis, string> = { step: "step", time: "time since the start", samples: "samples trained", tokens: "tokens trained" };

export interface Line {
  label: string;
  color: string;
  x: number[];
  y: (number | null)[];
  dash?: number[];
  width?: number;
  points?: boolean;
  faint?: boolean;
  low?: (number | null)[];
  high?: (number | null)[];
  steps?: boolean;
}

export interface Plot {
  title: string;
  note?: string;
  lines: Line[];
  axis: Axis;
  stacked?: boolean;
  fromZero?: boolean;
  tall?: boolean;
  marks?: number[];
}

export class ChartCard {
  readonly element: HTMLElement;
  private body = h("div", { class: "plot" });
  private legend = h("div", { class: "legend" });
  private title = h("h3");
  private note = h("span", { class: "note" });
  private log = makeTool("log", "logarithmic scale", () => this.change(() => (this.isLog = !this.isLog)));
  private enlarge = makeTool("⤢", "larger or smaller", () => this.change(() => (this.isLarge = this.element.classList.toggle("large"))));
  private unzoom = makeTool("all", "show everything again (or double click)", () => this.resetZoom());
  private isLog = false;
  private isLarge = false;
  private hidden = new Set<string>();
  private chart: uPlot | null = null;
  private shape = "";
  private plot: Plot | null = null;
  private observer: ResizeObserver;

  constructor() {
    this.element = h("figure", { class: "card chart" }, h("figcaption", {}, this.title, this.note, this.makeTools()), this.legend, this.body);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.body);
  }

  destroy(): void {
    this.observer.disconnect();
    this.chart?.destroy();
    this.chart = null;
  }

  private makeTools(): HTMLElement {
    const csv = makeTool("CSV", "download the numbers", () => this.plot && saveCsv(this.plot));
    const png = makeTool("PNG", "download the picture", () => this.plot && this.chart && savePng(this.plot, this.chart.ctx.canvas));
    this.unzoom.hidden = true;
    return h("span", { class: "tools" }, this.unzoom, this.log, csv, png, this.enlarge);
  }

  // Changes how the chart is drawn, and draws it.
  private change(act: () => void): void {
    act();
    this.shape = "";
    if (this.plot) this.show(this.plot);
  }

  private resetZoom(): void {
    this.chart?.setData(this.chart.data, true);
  }

  private size(): { width: number; height: number } {
    return { width: Math.max(120, this.body.clientWidth), height: this.isLarge ? 420 : this.plot?.tall ? 296 : 190 };
  }

  private resize(): void {
    if (this.chart && this.body.clientWidth && this.chart.width !== this.size().width) this.chart.setSize(this.size());
  }

  show(plot: Plot): void {
    this.plot = plot;
    this.title.textContent = plot.title;
    this.note.textContent = this.note.title = plot.note ?? "";
    const canLog = !plot.stacked && plot.lines.some((line) => line.y.some((value) => value !== null && value > 0));
    this.log.hidden = !canLog;
    this.log.setAttribute("aria-pressed", String(this.isLog));
    const data = makeData(plot);
    const shape = JSON.stringify([
      plot.axis, plot.stacked, plot.fromZero, store.dark, plot.marks, this.isLog,
      plot.lines.map((line) => [line.label, line.color, Boolean(line.low)]),
    ]);
    if (this.chart && shape === this.shape) {
      const zoomed = isZoomed(this.chart);
      this.chart.setData(data, !zoomed);
      this.showLegend(null);
      return;
    }
    this.shape = shape;
    this.chart?.destroy();
    const options = makeOptions(plot, this.size(), this.isLog && canLog, (place) => this.showLegend(place));
    options.hooks!.setScale = [(chart, scale) => { if (scale === "x") this.unzoom.hidden = !isZoomed(chart); }];
    this.chart = new uPlot(options, data, this.body);
    this.hideLines();
    this.body.setAttribute("role", "img");
    this.body.setAttribute("aria-label", `${plot.title}: ${plot.lines.map((line) => line.label).join(", ")}`);
    this.showLegend(null);
  }

  // Shows the values below the cursor, or the last ones.
  private showLegend(place: number | null): void {
    const plot = this.plot;
    if (!plot || !this.chart) return;
    const items = plot.lines.map((line) => {
      const x = place === null ? null : this.chart!.data[0][place];
      const value = x === null ? lastOf(line.y) : nearest(line, x);
      const isHidden = this.hidden.has(line.label);
      const toggle = () => { if (!this.hidden.delete(line.label)) this.hidden.add(line.label); this.hideLines(); this.showLegend(null); };
      return h(
        plot.lines.length > 1 && !plot.stacked ? "button" : "span",
        { class: isHidden ? "key off" : "key", "aria-pressed": plot.lines.length > 1 && !plot.stacked ? String(!isHidden) : undefined, title: plot.lines.length > 1 && !plot.stacked ? "show or hide" : undefined, onclick: toggle },
        h("i", { style: { background: line.color, opacity: line.faint ? "0.5" : "1" }, class: line.dash ? "dashed" : "" }),
        line.label,
        h("b", {}, formatNumber(value)),
      );
    });
    const at = place === null ? null : this.chart.data[0][place];
    if (at !== null) items.unshift(h("span", { class: "key at" }, formatX(plot.axis, at)));
    this.legend.replaceChildren(...items);
  }

  // Hides the lines that somebody has switched off in the legend, with their bands.
  private hideLines(): void {
    if (!this.chart || !this.plot || this.plot.stacked) return;
    let place = 1;
    for (const line of this.plot.lines) {
      const wanted = !this.hidden.has(line.label);
      for (let count = line.low && line.high ? 3 : 1; count > 0; count -= 1, place += 1)
        if (this.chart.series[place] && this.chart.series[place].show !== wanted) this.chart.setSeries(place, { show: wanted });
    }
  }
}

function makeTool(text: string, label: string, act: () => void): HTMLButtonElement {
  return h("button", { class: "tool", type: "button", title: label, "aria-label": label, onclick: act }, text);
}

function formatX(axis: Axis, value: number): string {
  return axis === "time" ? formatDuration(value) : axis === "step" ? `step ${value}` : `${formatNumber(value)} ${axis}`;
}

function lastOf(values: (number | null)[]): number | null {
  for (let place = values.length - 1; place >= 0; place -= 1) if (values[place] !== null) return values[place];
  return null;
}

function nearest(line: Line, x: number): number | null {
  let low = 0;
  let high = line.x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.x[middle] < x) low = middle + 1;
    else high = middle;
  }
  for (let place = low; place >= 0 && place > low - 12; place -= 1)
    if (line.x[place] <= x && line.y[place] !== null) return line.y[place];
  return line.y[low] ?? null;
}

function isZoomed(chart: uPlot): boolean {
  const xs = chart.data[0];
  const { min, max } = chart.scales.x;
  if (!xs.length || min === undefined || max === undefined || min === null || max === null) return false;
  return min > xs[0] || max < xs[xs.length - 1];
}

function makeData(plot: Plot): uPlot.AlignedData {
  const tables: uPlot.AlignedData[] = [];
  if (plot.stacked) {
    const joined = uPlot.join(plot.lines.map((line) => [line.x, line.y] as uPlot.AlignedData));
    const sums = new Array<number>(joined[0].length).fill(0);
    const stacked = joined.slice(1).map((values) => {
      const column = values as (number | null | undefined)[];
      return column.map((value, place) => (sums[place] += value ?? 0));
    });
    return [joined[0], ...stacked.reverse()] as uPlot.AlignedData;
  }
  for (const line of plot.lines) {
    tables.push([line.x, line.y] as uPlot.AlignedData);
    if (line.low && line.high) {
      tables.push([line.x, line.low] as uPlot.AlignedData);
      tables.push([line.x, line.high] as uPlot.AlignedData);
    }
  }
  if (!tables.length) return [[], []] as unknown as uPlot.AlignedData;
  return uPlot.join(tables);
}

function style(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function makeOptions(
  plot: Plot,
  size: { width: number; height: number },
  isLog: boolean,
  onMove: (place: number | null) => void,
): uPlot.Options {
  const ink = style("--muted");
  const grid = style("--grid");
  const font = `11px ${style("--font")}`;
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  const lines = plot.stacked ? [...plot.lines].reverse() : plot.lines;
  for (const line of lines) {
    if (plot.stacked) {
      const bars = uPlot.paths.bars!({ size: [0.9, 60, 1], gap: 0 });
      series.push({ label: line.label, stroke: line.color, fill: line.color, width: 0, paths: bars, points: { show: false } });
      continue;
    }
    series.push({
      label: line.label,
      stroke: line.faint ? fade(line.color, 0.32) : line.color,
      width: line.width ?? 1.75,
      dash: line.dash,
      spanGaps: true,
      paths: line.steps ? uPlot.paths.stepped!({ align: 1 }) : undefined,
      points: line.points ? { show: true, size: 6, fill: line.color } : { show: line.x.length < 3 },
    });
    if (line.low && line.high) {
      const place = series.length;
      series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
      series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
      bands.push({ series: [place + 1, place], fill: fade(line.color, 0.18) });
    }
  }
  const axis = { stroke: ink, font, grid: { stroke: grid, width: 1 }, ticks: { show: false }, gap: 4 };
  return {
    ...size,
    series,
    bands,
    padding: [10, plot.axis === "time" ? 24 : 10, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: `headway ${plot.axis}`, setSeries: false }, points: { size: 6 }, drag: { x: true, y: false } },
    scales: {
      x: plot.stacked ? { time: false, range: (_chart, low, high) => [low - 0.5, high + 0.5] } : { time: false },
      y: isLog ? { distr: 3, range: (_chart, low, high) => makeLogRange(plot, low, high) } : { range: (_chart, low, high) => makeRange(low, high, plot.fromZero ?? false) },
    },
    axes: [
      {
        ...axis, size: 22, label: AXIS_LABELS[plot.axis], labelFont: font, labelSize: 15, labelGap: 0,
        incrs: plot.axis !== "time" ? undefined : [0.1, 0.2, 0.5, ...TIME_STEPS],
        values: (_chart, splits, _place, _space, apart) => splits.map((value) => (plot.axis === "time" ? formatClock(value, apart) : Number.isInteger(value) ? formatNumber(value) : "")),
      },
      { ...axis, size: (_chart, values) => 14 + 6.4 * Math.max(4, ...(values ?? []).map((text) => text.length)), values: (_chart, splits, _place, _space, apart) => (isLog ? splits.map((value) => (isPowerOfTen(value) ? formatNumber(value) : "")) : formatTicks(splits, apart)) },
    ],
    hooks: {
      setCursor: [(chart) => onMove(chart.cursor.idx ?? null)],
      draw: plot.marks?.length ? [(chart) => drawMarks(chart, plot.marks!, ink)] : [],
    },
  };
}

function makeRange(low: number | null, high: number | null, fromZero: boolean): [number, number] {
  if (low === null || high === null) return [0, 1];
  if (fromZero) low = Math.min(0, low);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [fromZero && low === 0 ? 0 : low - room, high + room];
}

// A logarithmic axis ends at powers of ten around the positive values; those below have no place on it.
function makeLogRange(plot: Plot, low: number | null, high: number | null): [number, number] {
  const least = Math.min(...plot.lines.flatMap((line) => line.y.filter((value): value is number => value !== null && value > 0)));
  const from = low !== null && low > 0 ? low : least;
  const first = 10 ** Math.floor(Math.log10(from));
  return [first, Math.max(10 * first, 10 ** Math.ceil(Math.log10(Math.max(high ?? from, from))))];
}

function isPowerOfTen(value: number): boolean {
  return Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;
}

// Draws where the run was resumed.
function drawMarks(chart: uPlot, marks: number[], ink: string): void {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.strokeStyle = ink;
  ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const mark of marks) {
    const x = Math.round(chart.valToPos(mark, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

export function fade(color: string, alpha: number): string {
  const value = Number.parseInt(color.slice(1), 16);
  return `rgba(${value >> 16},${(value >> 8) & 255},${value & 255},${alpha})`;
}

// A little curve without axes.
export function sparkline(values: (number | null)[], color: string, width = 120, height = 32): HTMLCanvasElement {
  const canvas = h("canvas", { class: "spark", width: width * 2, height: height * 2, "aria-hidden": "true" });
  const known = values.filter((value): value is number => value !== null);
  const context = canvas.getContext("2d");
  if (!context || known.length < 2) return canvas;
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  context.strokeStyle = color;
  context.lineWidth = 3;
  context.lineJoin = "round";
  context.beginPath();
  known.forEach((value, place) => {
    const x = (place / (known.length - 1)) * (width * 2 - 8) + 4;
    const y = height * 2 - 5 - ((value - low) / span) * (height * 2 - 10);
    if (place) context.lineTo(x, y);
    else context.moveTo(x, y);
  });
  context.stroke();
  return canvas;
}

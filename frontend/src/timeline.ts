// Timeline: a lane for each stage, engine and device on one canvas that zooms; bubbles shaded, versions marked.

import { ask, type Lane, type Timeline as Window } from "./api";
import { fade } from "./charts";
import { formatClock, formatDuration, formatNumber, h, replace, TIME_STEPS } from "./dom";
import { store } from "./store";
import type { View } from "./views";

const LABELS = innerWidth < 600 ? 92 : 118;
const TOP = 64;
const HEIGHTS: Record<string, number> = { state: 20, engine: 26, pool: 18, gpu: 22, groups: 26, drops: 18 };
const TITLES: Record<string, string> = { state: "stages", engine: "engines", gpu: "devices", pool: "worker pools", groups: "groups", drops: "drops" };
const SIGNS: Record<string, string> = {
  error: "✕", restart: "↻", down: "▼", up: "▲", join: "+", leave: "−", retry: "↺", degrade: "!", restore: "✓", stall: "‖",
  checkpoint: "■", "validate.end": "◆", "run.begin": "▶", "run.end": "⏹",
};
const BAD = new Set(["error", "down", "stall", "degrade", "restart"]);

interface Colors {
  ink: string; muted: string; grid: string; surface: string; bubble: string;
  states: Record<string, string>;
  engine: string; pool: string; gpu: string; groups: string; drops: string; trained: string; served: string;
}

function colors(): Colors {
  const dark = store.dark;
  const palette = store.palette();
  return {
    ink: dark ? "#e6e9ef" : "#1b2430", muted: dark ? "#98a2b3" : "#5c6773", grid: dark ? "#2a323e" : "#e3e7ed",
    surface: dark ? "#171c24" : "#ffffff", bubble: dark ? "#f0c63c" : "#b58900",
    states: {
      running: palette[0], emitting: palette[2], waiting: dark ? "#313a47" : "#e4e8ee", idle: dark ? "#1f2630" : "#f3f5f8",
      recovering: palette[3], degraded: palette[1], stopped: dark ? "#4b5563" : "#9aa4b2", failed: dark ? "#ff6b57" : "#b3261e",
    },
    engine: palette[2], pool: palette[5], gpu: palette[3], groups: palette[0], drops: palette[1], trained: palette[0], served: palette[1],
  };
}

// One run on one canvas.
class Pane {
  readonly element: HTMLElement;
  private canvas = h("canvas", { class: "lanes", tabindex: 0, role: "application", "aria-label": "timeline: arrow keys move, plus and minus zoom, 0 shows everything" });
  private tip = h("div", { class: "tip", role: "status", hidden: true });
  private said = h("span", { class: "note" }, "reading the log…");
  private data: Window | null = null;
  private from = 0;
  private to = 0;
  private whole = true;
  private wanted = 0;
  private timer = 0;
  private pointers = new Map<number, PointerEvent>();
  private hover: { x: number; y: number } | null = null;
  private observer: ResizeObserver;

  constructor(private readonly run: string) {
    const button = (text: string, label: string, act: () => void) => h("button", { class: "icon", "aria-label": label, title: label, onclick: act }, text);
    const trace = h("button", { class: "plain", title: "this stretch of time, to open at ui.perfetto.dev", onclick: () => this.export() }, "Perfetto ⤓");
    this.element = h("section", { class: "card timeline" },
      h("header", {}, h("h3", {}, h("i", { class: "dot", style: { background: store.color(run) } }), store.heads.get(run)?.name ?? run), this.said,
        h("span", { class: "buttons" }, button("−", "zoom out (−)", () => this.zoom(2)), button("+", "zoom in (+)", () => this.zoom(0.5)), button("⤢", "show everything (0)", () => this.showAll()), trace)),
      h("div", { class: "stage" }, this.canvas, this.tip), makeKey());
    this.listen();
    this.observer = new ResizeObserver(() => { this.draw(); this.ask(); });
    this.observer.observe(this.canvas);
    void this.load();
  }

  destroy(): void {
    this.observer.disconnect();
    clearTimeout(this.timer);
  }

  // The stretch of time in sight, for tests and for the keyboard.
  get range(): [number, number] {
    return [this.from, this.to];
  }

  refresh(): void {
    if (this.whole || (this.data && this.to >= this.data.end - 1e-9)) this.ask(400);
  }

  private width(): number {
    return Math.max(60, this.canvas.clientWidth - LABELS - 8);
  }

  private ask(wait = 120): void {
    if (this.timer) return;
    this.timer = window.setTimeout(() => { this.timer = 0; void this.load(); }, wait);
  }

  private async load(): Promise<void> {
    const number = (this.wanted += 1);
    const bins = Math.round(Math.min(900, this.width()));
    const query = this.whole ? {} : { from: this.from, to: this.to };
    const data = await ask<Window>("run/timeline", { run: this.run, bins, ...query }).catch(() => null);
    if (!data || number !== this.wanted) return;
    this.data = data;
    if (this.whole) [this.from, this.to] = [data.start, data.end];
    this.draw();
  }

  private listen(): void {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (sideways || event.shiftKey) this.move(((sideways ? event.deltaX : event.deltaY) / this.width()) * (this.to - this.from));
      else this.zoom(Math.exp(event.deltaY * 0.0015), this.timeAt(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); this.pointers.set(event.pointerId, event); });
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    for (const name of ["pointerup", "pointercancel"] as const) canvas.addEventListener(name, (event) => this.pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => { this.hover = null; this.tip.hidden = true; this.draw(); });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.25, this.timeAt(event.offsetX)));
    canvas.addEventListener("keydown", (event) => { if (this.key(event)) event.preventDefault(); });
  }

  key(event: KeyboardEvent): boolean {
    const span = this.to - this.from;
    if (event.key === "ArrowLeft") this.move(-span / 8);
    else if (event.key === "ArrowRight") this.move(span / 8);
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0") this.showAll();
    else return false;
    return true;
  }

  private drag(event: PointerEvent): void {
    const before = this.pointers.get(event.pointerId);
    if (before && this.pointers.size === 1) {
      this.move(((before.clientX - event.clientX) / this.width()) * (this.to - this.from));
    } else if (before && this.pointers.size === 2) {
      const other = [...this.pointers.values()].find((one) => one.pointerId !== event.pointerId)!;
      const apart = Math.abs(event.clientX - other.clientX) || 1;
      const rect = this.canvas.getBoundingClientRect();
      this.zoom(Math.abs(before.clientX - other.clientX) / apart, this.timeAt((event.clientX + other.clientX) / 2 - rect.left));
    }
    if (before) this.pointers.set(event.pointerId, event);
    this.hover = { x: event.offsetX, y: event.offsetY };
    this.draw();
    this.showTip();
  }

  private move(seconds: number): void {
    this.setRange(this.from + seconds, this.to + seconds);
  }

  private zoom(factor: number, around = (this.from + this.to) / 2): void {
    this.setRange(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  private showAll(): void {
    this.whole = true;
    if (this.data) [this.from, this.to] = [this.data.start, this.data.end];
    this.draw();
    this.ask(0);
  }

  private setRange(from: number, to: number): void {
    if (!this.data) return;
    const { start, end } = this.data;
    const span = Math.min(Math.max(to - from, 1e-4), end - start || 1);
    const first = Math.min(Math.max(from, start), end - span);
    [this.from, this.to] = [first, first + span];
    this.whole = span >= (end - start) * 0.999;
    this.draw();
    this.ask();
  }

  private timeAt(x: number): number {
    return this.from + (Math.min(Math.max(x - LABELS, 0), this.width()) / this.width()) * (this.to - this.from);
  }

  private x(time: number): number {
    return LABELS + ((time - this.from) / (this.to - this.from || 1)) * this.width();
  }

  private export(): void {
    const words = new URLSearchParams({ run: this.run });
    if (!this.whole) { words.set("from", String(this.from)); words.set("to", String(this.to)); }
    location.assign(`/api/run/trace?${words}`);
  }

  private lanes(): { lane: Lane; y: number; height: number; title: string }[] {
    let y = TOP;
    let kind = "";
    return (this.data?.lanes ?? []).map((lane) => {
      const title = lane.kind === kind ? "" : TITLES[lane.kind];
      if (title) y += 18;
      kind = lane.kind;
      const placed = { lane, y, height: HEIGHTS[lane.kind] ?? 20, title };
      y += placed.height + 4;
      return placed;
    });
  }

  private draw(): void {
    const data = this.data;
    if (!data) return;
    const lanes = this.lanes();
    const last = lanes[lanes.length - 1];
    const height = (last ? last.y + last.height : TOP) + 12;
    const ratio = window.devicePixelRatio || 1;
    const { canvas } = this;
    canvas.style.height = `${height}px`;
    const width = canvas.clientWidth;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    const color = colors();
    this.drawAxis(context, color, height);
    for (const { lane, y, height: tall, title } of lanes) {
      if (title) {
        context.fillStyle = color.muted;
        context.font = `600 10px ${getComputedStyle(document.body).fontFamily}`;
        context.fillText(title.toUpperCase(), 2, y - 8);
        context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
      }
      context.fillStyle = color.ink;
      context.fillText(shorten(context, lane.name.replaceAll("_", " "), LABELS - 10), 2, y + tall / 2);
      context.save();
      context.beginPath();
      context.rect(LABELS, y, this.width(), tall);
      context.clip();
      this.drawLane(context, color, lane, y, tall);
      context.restore();
    }
    this.drawTop(context, color, height);
    const events = data.exact ? "every event" : "means of bins; zoom in for every event";
    this.said.textContent = `${formatDuration(this.to - this.from)} in sight · ${formatNumber(data.steps_in_sight)} steps · ${events}`;
    canvas.dataset.from = String(this.from);
    canvas.dataset.to = String(this.to);
    canvas.dataset.exact = String(data.exact);
    canvas.dataset.lanes = String(lanes.length);
  }

  private drawAxis(context: CanvasRenderingContext2D, color: Colors, height: number): void {
    const span = this.to - this.from || 1;
    const rough = span / Math.max(3, this.width() / 90);
    const power = 10 ** Math.floor(Math.log10(rough));
    const each = (rough < 1 ? [1, 2, 5, 10].map((one) => one * power) : TIME_STEPS).find((one) => one >= rough) ?? 10 * power;
    context.strokeStyle = color.grid;
    context.fillStyle = color.muted;
    context.lineWidth = 1;
    for (let time = Math.ceil(this.from / each) * each; time <= this.to; time += each) {
      const x = Math.round(this.x(time)) + 0.5;
      context.beginPath();
      context.moveTo(x, 16);
      context.lineTo(x, height);
      context.stroke();
      const text = formatClock(time, each);
      if (x + 3 + context.measureText(text).width < LABELS + this.width()) context.fillText(text, x + 3, 9);
    }
  }

  // Draws steps, versions and markers above the lanes.
  private drawTop(context: CanvasRenderingContext2D, color: Colors, height: number): void {
    const data = this.data!;
    context.fillStyle = color.muted;
    context.fillText("steps", 2, 26);
    context.fillText("versions, faults", 2, 48);
    context.save();
    context.beginPath();
    context.rect(LABELS, 0, this.width(), height);
    context.clip();
    for (const [begin, end, version] of data.steps) {
      const x = this.x(begin);
      const wide = Math.max(1, this.x(end) - x);
      context.fillStyle = fade(color.trained, version % 2 ? 0.85 : 0.6);
      context.fillRect(x, 18, wide, 15);
      if (wide > 26) {
        context.fillStyle = "#fff";
        context.fillText(String(version), x + 4, 26);
      }
    }
    let before = Number.NaN;
    let labelled = -100;
    const dense = data.versions.length > 80;
    for (const [time, , served] of data.versions) {
      if (served === before) continue;
      before = served;
      const x = Math.round(this.x(time)) + 0.5;
      context.strokeStyle = fade(color.served, dense ? 0.25 : 0.55);
      context.setLineDash([2, 3]);
      context.beginPath();
      context.moveTo(x, 38);
      context.lineTo(x, dense ? 58 : height);
      context.stroke();
      context.setLineDash([]);
      if (!dense && x - labelled > 26) {
        labelled = x;
        context.fillStyle = color.served;
        context.fillText(`v${served}`, x + 2, 42);
      }
    }
    context.textAlign = "center";
    for (const [time, kind] of data.markers) {
      context.fillStyle = BAD.has(kind) ? color.states.failed : color.muted;
      context.fillText(SIGNS[kind] ?? "•", this.x(time), 55);
    }
    context.textAlign = "left";
    if (this.hover && this.hover.x > LABELS) {
      context.strokeStyle = color.muted;
      context.beginPath();
      context.moveTo(Math.round(this.hover.x) + 0.5, 16);
      context.lineTo(Math.round(this.hover.x) + 0.5, height);
      context.stroke();
    }
    context.restore();
  }

  private drawLane(context: CanvasRenderingContext2D, color: Colors, lane: Lane, y: number, tall: number): void {
    if (lane.spans) {
      for (let place = 0; place < lane.spans.length; place += 3) {
        const state = this.data!.states[lane.spans[place + 2]];
        const x = this.x(lane.spans[place]);
        const wide = Math.max(0.75, this.x(lane.spans[place + 1]) - x);
        context.fillStyle = color.states[state] ?? color.grid;
        context.fillRect(x, y, wide, tall);
        if (state === "waiting" && wide > 3) hatch(context, fade(color.bubble, 0.35), x, y, wide, tall);
      }
    } else if (lane.shares) this.drawShares(context, color, lane.shares, y, tall);
    else if (lane.reasons) this.drawDrops(context, color, lane.reasons, y, tall);
    else this.drawArea(context, color, lane, y, tall);
  }

  private eachBin(count: number, act: (place: number, x: number, wide: number) => void): void {
    const { from, to } = this.data!;
    const each = (to - from) / count;
    for (let place = 0; place < count; place += 1) {
      const x = this.x(from + place * each);
      const next = this.x(from + (place + 1) * each);
      if (next < LABELS || x > LABELS + this.width()) continue;
      act(place, x, Math.max(0.5, next - x) + 0.4);
    }
  }

  private drawShares(context: CanvasRenderingContext2D, color: Colors, shares: Record<string, number[]>, y: number, tall: number): void {
    const order = ["running", "emitting", "degraded", "recovering", "failed", "waiting", "idle", "stopped"].filter((state) => shares[state]);
    const count = Math.max(0, ...order.map((state) => shares[state].length));
    this.eachBin(count, (place, x, wide) => {
      let top = y + tall;
      for (const state of order) {
        const part = Math.min(1, shares[state][place] ?? 0) * tall;
        if (part < 0.05) continue;
        context.fillStyle = color.states[state] ?? color.grid;
        context.fillRect(x, top - part, wide, part);
        if (state === "waiting" && part > tall * 0.5) {
          context.fillStyle = fade(color.bubble, 0.22);
          context.fillRect(x, top - part, wide, part);
        }
        top -= part;
      }
    });
  }

  private drawArea(context: CanvasRenderingContext2D, color: Colors, lane: Lane, y: number, tall: number): void {
    const fill = lane.kind === "engine" ? color.engine : lane.kind === "gpu" ? color.gpu : lane.kind === "pool" ? color.pool : color.groups;
    const peak = lane.kind === "gpu" ? 1 : lane.peak || 1;
    context.fillStyle = fade(fill, 0.1);
    context.fillRect(LABELS, y, this.width(), tall);
    const bar = (x: number, wide: number, amount: number) => {
      const part = Math.min(1, amount / peak) * tall;
      if (amount > 0) { context.fillStyle = fill; context.fillRect(x, y + tall - Math.max(1, part), wide, Math.max(1, part)); }
    };
    if (lane.points) {
      for (let place = 0; place < lane.points.length; place += 2) {
        const end = place + 2 < lane.points.length ? lane.points[place + 2] : this.data!.to;
        const x = Math.max(LABELS - 1, this.x(lane.points[place]));
        const wide = this.x(end) - x;
        if (wide <= 0) continue;
        bar(x, wide + 0.3, lane.points[place + 1]);
        if (lane.kind === "engine" && !lane.points[place + 1] && wide > 2) hatch(context, fade(color.bubble, 0.45), x, y, wide, tall);
      }
      return;
    }
    const mean = lane.mean ?? [];
    this.eachBin(mean.length, (place, x, wide) => {
      const idle = lane.kind === "engine" && lane.busy?.length ? 1 - (lane.busy[place] ?? 0) : 0;
      if (idle > 0.02) { context.fillStyle = fade(color.bubble, 0.4 * idle); context.fillRect(x, y, wide, tall); }
      bar(x, wide, mean[place] ?? 0);
    });
  }

  private drawDrops(context: CanvasRenderingContext2D, color: Colors, reasons: Record<string, number[]>, y: number, tall: number): void {
    const rows = Object.values(reasons);
    const sums = rows[0].map((_, place) => rows.reduce((total, row) => total + row[place], 0));
    const peak = Math.max(...sums, 1);
    this.eachBin(sums.length, (place, x, wide) => {
      if (sums[place] < 0.01) return;
      const part = Math.max(2, (sums[place] / peak) * tall);
      context.fillStyle = color.drops;
      context.fillRect(x, y + tall - part, wide, part);
    });
  }

  private showTip(): void {
    const data = this.data;
    if (!data || !this.hover || this.hover.x < LABELS) { this.tip.hidden = true; return; }
    const time = this.timeAt(this.hover.x);
    const rows: Node[] = [h("b", {}, formatDuration(time))];
    const near = data.markers.filter((one) => Math.abs(this.x(one[0]) - this.hover!.x) < 7);
    if (this.hover.y < TOP) {
      for (const [at, kind, who, text] of near.slice(0, 4)) rows.push(h("p", {}, h("b", {}, `${SIGNS[kind] ?? "•"} ${kind}`), ` ${who}`, h("br"), `${formatDuration(at)} ${text}`));
    }
    const step = data.steps.find((one) => one[0] <= time && time <= one[1]);
    if (step) rows.push(h("p", {}, `step ${step[2]}: ${formatDuration(step[1] - step[0])} of training`));
    const version = data.versions.findLast((one) => one[0] <= time);
    if (version) rows.push(h("p", {}, `trained ${version[1]}, served ${version[2]}`));
    const found = this.lanes().find((one) => this.hover!.y >= one.y && this.hover!.y <= one.y + one.height);
    if (found) rows.push(h("p", {}, h("b", {}, found.lane.name), ` ${this.describe(found.lane, time)}`));
    replace(this.tip, ...rows);
    this.tip.hidden = false;
    const left = Math.min(this.hover.x + 14, this.canvas.clientWidth - this.tip.offsetWidth - 4);
    Object.assign(this.tip.style, { left: `${Math.max(0, left)}px`, top: `${this.hover.y + 16}px` });
  }

  private describe(lane: Lane, time: number): string {
    const data = this.data!;
    if (lane.spans) {
      for (let place = 0; place < lane.spans.length; place += 3)
        if (lane.spans[place] <= time && time <= lane.spans[place + 1])
          return `${data.states[lane.spans[place + 2]]} for ${formatDuration(lane.spans[place + 1] - lane.spans[place])}`;
      return "";
    }
    if (lane.points) {
      let count = 0;
      for (let place = 0; place < lane.points.length && lane.points[place] <= time; place += 2) count = lane.points[place + 1];
      return lane.kind === "engine" ? `${count} requests${count ? "" : ": a bubble"}` : `${count} open`;
    }
    const bin = (values: (number | null)[]) => values[Math.min(values.length - 1, Math.floor(((time - data.from) / (data.to - data.from)) * values.length))] ?? 0;
    if (lane.shares) {
      const parts = Object.entries(lane.shares).map(([state, values]) => [state, bin(values)] as const);
      return parts.filter((part) => part[1] > 0.005).sort((one, other) => other[1] - one[1]).map(([state, part]) => `${state} ${Math.round(part * 100)} %`).join(", ");
    }
    if (lane.reasons) return Object.entries(lane.reasons).map(([reason, values]) => [reason, bin(values)] as const).filter((part) => part[1] > 0.01).map(([reason, count]) => `${reason} ${formatNumber(count)}`).join(", ") || "none";
    const value = bin(lane.mean ?? []);
    if (lane.kind === "gpu") return `${Math.round(value * 100)} % busy`;
    const idle = lane.busy?.length ? `, idle ${Math.round((1 - bin(lane.busy)) * 100)} %` : "";
    return `${formatNumber(value)} on average${lane.kind === "engine" ? " requests" : ""}${idle}`;
  }
}

function shorten(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  while (text.length > 1 && context.measureText(`${text}…`).width > width) text = text.slice(0, -1);
  return `${text}…`;
}

function hatch(context: CanvasRenderingContext2D, color: string, x: number, y: number, wide: number, tall: number): void {
  context.save();
  context.beginPath();
  context.rect(x, y, wide, tall);
  context.clip();
  context.strokeStyle = color;
  context.lineWidth = 1.5;
  context.beginPath();
  const first = Math.max(x, LABELS) - ((Math.max(x, LABELS) - x) % 6);
  for (let at = first - tall; at < Math.min(x + wide, first + 4000); at += 6) {
    context.moveTo(at, y + tall);
    context.lineTo(at + tall, y);
  }
  context.stroke();
  context.restore();
}

function makeKey(): HTMLElement {
  const color = colors();
  const item = (fill: string, text: string) => h("span", { class: "key" }, h("i", { style: { background: fill } }), text);
  return h("footer", { class: "legend" }, item(color.states.running, "running"), item(color.states.emitting, "emitting; requests of an engine"),
    h("span", { class: "key" }, h("i", { class: "hatched" }), "bubble: waits, or has no request"),
    item(color.states.degraded, "degraded, dropped"), item(color.states.recovering, "recovering"),
    h("span", { class: "key" }, "wheel or pinch zooms, drag moves, double click zooms in"));
}

export class Timeline implements View {
  readonly element = h("div", { class: "view" });
  private panes: Pane[] = [];

  constructor() {
    this.update("chosen");
  }

  update(what: string, run?: string): void {
    if (what === "chosen" || what === "theme") {
      this.destroy();
      this.panes = store.chosen.slice(0, 4).map((one) => new Pane(one));
      replace(this.element, ...this.panes.map((pane) => pane.element));
      if (!store.chosen.length) this.element.append(h("p", { class: "empty" }, "No run is chosen. Choose one above, or press r."));
      if (store.chosen.length > 4) this.element.append(h("p", { class: "note" }, "The first four of the chosen runs are shown."));
    } else if (what === "status" && run) this.panes[store.chosen.indexOf(run)]?.refresh();
  }

  key(event: KeyboardEvent): boolean {
    return Boolean(this.panes[0]?.key(event));
  }

  destroy(): void {
    for (const pane of this.panes) pane.destroy();
  }
}

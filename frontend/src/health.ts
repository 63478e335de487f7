// Health: what each stage does and waits for, workers, restarts, queues, memory, devices, speed.

import { ask, type Chart, type Stage, type Status } from "./api";
import { formatDuration, formatNumber, h, replace, svg } from "./dom";
import { store } from "./store";
import { ChartGrid, HEALTH_SIGNS, type View } from "./views";

const CHARTS = /^(memory|gpu_|throughput|time)/;
const MFU: Chart = { title: "Use of the arithmetic (MFU)", curves: [["throughput/mfu", "while it trains"]], note: "share of what the devices can compute", kind: "line", from_zero: true };
const KINDS: Record<string, string> = { "validate.end": "validation", "run.begin": "start", "run.end": "end", checkpoint: "checkpoint" };
const SIGNS: Record<string, string> = { running: "●", waiting: "○", emitting: "◆", idle: "·", stopped: "■" };

interface Incidents {
  status: Status | null;
  incidents: [number, string, string, string][];
}

export class Health implements View {
  readonly element = h("div", { class: "view" });
  private panels = h("div", { class: "view" });
  private grid = new ChartGrid(() => [...store.charts.filter((chart) => chart.curves.some(([name]) => CHARTS.test(name))), MFU]);
  private incidents = new Map<string, Incidents["incidents"]>();
  private faults = "";

  constructor() {
    this.element.append(this.panels, this.grid.element);
    this.update("chosen");
  }

  update(what: string): void {
    const faults = JSON.stringify(store.chosen.map((run) => [run, store.heads.get(run)?.faults, store.heads.get(run)?.step]));
    if (faults !== this.faults) {
      this.faults = faults;
      for (const run of store.chosen.slice(0, 4)) void this.load(run);
    }
    if (what !== "curves") this.draw();
    if (what !== "status") this.grid.update();
  }

  destroy(): void {
    this.grid.destroy();
  }

  private async load(run: string): Promise<void> {
    const found = await ask<Incidents>("run/health", { run }).catch(() => null);
    if (!found) return;
    this.incidents.set(run, found.incidents);
    if (!store.status.has(run)) store.status.set(run, found.status);
    this.draw();
  }

  private draw(): void {
    if (!store.chosen.length) { replace(this.panels, h("p", { class: "empty" }, "No run is chosen. Choose one above, or press r.")); return; }
    replace(this.panels, ...store.chosen.slice(0, 4).map((run) => this.makePanel(run)));
  }

  private makePanel(run: string): HTMLElement {
    const head = store.heads.get(run);
    const status = store.status.get(run) ?? null;
    const [sign, said] = head?.health ?? ["good", ""];
    const panel = h("section", { class: "healthpanel" },
      h("header", { class: "card" }, h("h3", {}, h("i", { class: "dot", style: { background: store.color(run) } }), head?.name ?? run),
        h("p", { class: `health ${sign}` }, h("span", { class: "sign" }, HEALTH_SIGNS[sign] ?? "?"), said),
        h("p", { class: "note" }, status ? `${said.includes(status.condition) ? "" : `${status.condition}; `}step ${status.trained}, served ${status.served}${status.level === "normal" ? "" : `, degraded: ${status.level}`}${status.host ? `; process ${status.process} on ${status.host}` : ""}` : "no status: a simulated run, or a log alone")));
    if (status && !status.finished && status.phase !== "ended")
      panel.append(h("div", { class: "grid two" }, h("section", { class: "card" }, h("h3", {}, "Stages"), makeStages(status.stages)),
        h("section", { class: "card" }, h("h3", {}, "Who waits for whom"), makeGraph(status), makeCulprits(status))));
    if (status) panel.append(h("section", { class: "card" }, h("h3", {}, "Workers"), this.makeWorkers(run, status)));
    const rows = this.incidents.get(run) ?? [];
    const none = this.incidents.has(run) ? "No validation, checkpoint or fault so far." : "reading the log…";
    panel.append(h("section", { class: "card" }, h("h3", {}, "Incidents", h("span", { class: "note" }, " newest first; validations and checkpoints among them")), rows.length
      ? h("ol", { class: "incidents" }, ...rows.slice(0, 60).map(([time, kind, who, text]) => h("li", {}, h("time", {}, formatDuration(time)), h("b", { class: kind }, KINDS[kind] ?? kind), h("span", {}, kind in KINDS ? "" : who), h("span", { class: "text" }, text.replace(/-?\d+\.\d{4,}(e-?\d+)?/g, (digits) => formatNumber(Number(digits)))))))
      : h("p", { class: "note" }, none)));
    return panel;
  }

  private makeWorkers(run: string, status: Status): HTMLElement {
    const faults = store.heads.get(run)?.faults ?? {};
    const restarts = (name: string) => String(faults[`restart ${name}`] ?? 0);
    const usage = Object.entries(status.usage ?? {}).map(([name, value]) => h("div", {}, h("dt", {}, nameUsage(name)), h("dd", {}, name.startsWith("gpu_utilization") ? `${formatNumber(100 * value)} %` : /_gb\b/.test(name) ? `${formatNumber(value)} GB` : formatNumber(value))));
    const rows = status.engines.map((engine) => h("tr", {}, h("td", {}, engine.name), h("td", {}, status.phase === "ended" ? "ended" : `${engine.health === "up" ? "✓" : "✕"} ${engine.health}`), h("td", { class: "number" }, engine.version), h("td", { class: "number" }, engine.requests), h("td", { class: "number" }, restarts(engine.name))));
    rows.push(h("tr", {}, h("td", {}, "trainer"), h("td", {}, status.phase), h("td", { class: "number" }, status.trained), h("td", { class: "number" }, "–"), h("td", { class: "number" }, restarts("trainer"))));
    return h("div", {}, h("table", {}, h("thead", {}, h("tr", {}, ...["worker", "health", "version", "requests", "restarts"].map((text, place) => h("th", { class: place > 1 ? "number" : "" }, text)))), h("tbody", {}, ...rows)), usage.length ? h("dl", { class: "facts wide" }, ...usage) : null);
  }
}

// Names a number of memory or of a GPU: memory/controller_gb, gpu_memory_gb/0.
function nameUsage(name: string): string {
  const [kind, which] = name.split("/");
  const what = kind.replace(/_gb$/, "").replaceAll("_", " ").replace("gpu ", "");
  return kind.startsWith("gpu") ? `GPU ${which}, ${what}` : `${what} of ${which.replace(/_gb$/, "").replace("host", "the whole machine").replace("children", "its processes").replace("controller", "headway train")}`;
}

function makeStages(stages: Stage[]): HTMLElement {
  return h("table", { class: "stages" }, h("tbody", {}, ...stages.map((stage) => h("tr", {},
    h("td", {}, h("span", { class: `state ${stage.state}`, "aria-hidden": "true" }, SIGNS[stage.state] ?? "!"), stage.role.replaceAll("_", " ")),
    h("td", {}, `${stage.state} ${formatDuration(stage.seconds)}`),
    h("td", { class: "number" }, stage.queue ? `${stage.queue} queued` : ""),
    h("td", { class: "waits" }, ...stage.waits.slice(0, 2).map((wait) => h("div", {}, `${wait.on}: ${wait.what}, ${formatDuration(wait.seconds)}`)))))));
}

function makeCulprits(status: Status): HTMLElement | null {
  if (!status.culprits.length) return h("p", { class: "note" }, "Nobody holds the run up.");
  const old = status.quiet_s > 60;
  return h("ul", { class: old ? "culprits old" : "culprits" }, ...status.culprits.map((text) => h("li", {}, `culprit: ${text}`)));
}

// Draws an arrow from everybody who waits to whom they wait for, in layers: those who wait for nobody at the bottom.
export function makeGraph(status: Status): Element {
  const edges = new Map<string, { from: string; to: string; seconds: number; what: string }>();
  for (const stage of status.stages)
    for (const wait of stage.waits) {
      const key = `${stage.role}→${wait.on}`;
      const known = edges.get(key);
      if (!known || known.seconds < wait.seconds) edges.set(key, { from: stage.role, to: wait.on, seconds: wait.seconds, what: wait.what });
    }
  const names = [...new Set([...edges.values()].flatMap((edge) => [edge.from, edge.to]))];
  if (!names.length) return h("p", { class: "note" }, "Nobody waits.");
  const depth = new Map<string, number>();
  const measure = (name: string, above: string[]): number => {
    const known = depth.get(name);
    if (known !== undefined) return known;
    const below = [...edges.values()].filter((edge) => edge.from === name && !above.includes(edge.to) && edge.to !== name);
    const found = Math.max(0, ...below.map((edge) => 1 + measure(edge.to, [...above, name])));
    depth.set(name, found);
    return found;
  };
  for (const name of names) measure(name, []);
  const layers = [...new Set(depth.values())].sort((one, other) => other - one);
  const rows = new Map<number, number>();
  const places = new Map<string, { x: number; y: number }>();
  const wide = 132;
  const apart = { x: wide + 16, y: 50 };
  for (const name of names) {
    const layer = layers.indexOf(depth.get(name)!);
    const row = rows.get(layer) ?? 0;
    rows.set(layer, row + 1);
    places.set(name, { x: 4 + row * apart.x, y: 4 + layer * apart.y });
  }
  const width = Math.max(...rows.values()) * apart.x;
  const height = layers.length * apart.y - 12;
  const owners = new Set([...edges.values()].map((edge) => edge.from));
  const marker = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 0 8 4 0 8z", class: "head" }));
  const graph = svg("svg", { class: "graph", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": [...edges.values()].map((edge) => `${edge.from} waits for ${edge.to}`).join("; ") }, svg("defs", {}, marker));
  (graph as SVGElement & { style: CSSStyleDeclaration }).style.maxWidth = `${width}px`;
  for (const edge of edges.values()) {
    const from = places.get(edge.from)!;
    const to = places.get(edge.to)!;
    const back = to.y <= from.y;
    const start = { x: from.x + (back ? wide : wide / 2), y: from.y + (back ? 15 : 30) };
    const end = { x: to.x + (back ? wide : wide / 2), y: to.y + (back ? 15 : 0) };
    const path = back ? `M${start.x} ${start.y}C${start.x + 26} ${start.y} ${end.x + 26} ${end.y} ${end.x} ${end.y}` : `M${start.x} ${start.y}C${start.x} ${start.y + 14} ${end.x} ${end.y - 14} ${end.x} ${end.y}`;
    graph.append(svg("path", { d: path, class: edge.seconds > 60 ? "edge old" : "edge", "marker-end": "url(#arrow)" }, svg("title", {}, `${edge.from} waits for ${edge.to}: ${edge.what} (${formatDuration(edge.seconds)})`)));
  }
  for (const [name, { x, y }] of places) {
    const culprit = !owners.has(name);
    graph.append(svg("g", { class: culprit ? "node culprit" : "node" }, svg("rect", { x, y, width: wide, height: 30, rx: 6 }), svg("text", { x: x + wide / 2, y: y + 19, "text-anchor": "middle" }, name.length > 19 ? `${name.slice(0, 18)}…` : name), svg("title", {}, name)));
  }
  return graph;
}

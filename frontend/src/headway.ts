// Headway: how far rollout runs ahead, what was served when, what was dropped and why, and what that does to lengths.

import { ask, type Chart, type Flow } from "./api";
import { ChartCard } from "./charts";
import { formatNumber, h, replace } from "./dom";
import { store } from "./store";
import { ChartGrid, makeCurveControls, type View } from "./views";

const CHARTS: Chart[] = [
  { title: "Lag of trained samples", curves: [["lag/mean", "mean"], ["lag/max", "max"]], note: "in versions; dashed: what α allows", kind: "lag", from_zero: true },
  { title: "Samples by lag", curves: [["lag_samples/", "lag"]], note: "trained in each step", kind: "bars", from_zero: true },
  { title: "Served behind trained", curves: [["lag/served_behind", "mean"]], note: "in versions, over the time of the step", kind: "line", from_zero: true },
  { title: "Samples dropped", curves: [["drops/", ""]], note: "in each step, by reason", kind: "bars", from_zero: true },
  { title: "Length bias", curves: [["bias/length", "length"], ["bias/reward", "reward"]], note: "trained against started in the run so far; 0.02 is 2 %", kind: "line", from_zero: false },
  { title: "Lengths", curves: [["length/trained", "trained"], ["length/started", "started"], ["length/dropped", "dropped"]], note: "mean tokens of a sample", kind: "line", from_zero: true },
];

export class Headway implements View {
  readonly element = h("div", { class: "view" });
  private controls = h("div");
  private groups = new ChartCard();
  private versions = new ChartCard();
  private drops = h("section", { class: "card" });
  private grid = new ChartGrid(() => CHARTS);
  private timer = 0;
  private loading = false;

  constructor() {
    this.element.append(this.controls, h("div", { class: "grid two" }, this.groups.element, this.versions.element), this.grid.element, this.drops);
    this.update("chosen");
  }

  update(what: string): void {
    if (what === "chosen" || what === "theme") replace(this.controls, makeCurveControls(() => this.grid.draw()));
    if (what !== "status") this.grid.update();
    this.drawDrops();
    if (!this.timer) this.timer = window.setTimeout(() => { this.timer = 0; void this.load(); }, what === "chosen" ? 0 : 1000);
  }

  destroy(): void {
    clearTimeout(this.timer);
    this.grid.destroy();
    this.groups.destroy();
    this.versions.destroy();
  }

  private async load(): Promise<void> {
    if (this.loading) return;
    this.loading = true;
    try {
      const runs = store.chosen.slice(0, 4);
      const found = await Promise.all(runs.map((run) => ask<Flow>("run/flow", { run })));
      this.draw(runs, found);
    } catch {
      /* the server is gone, which the top of the page says; the charts keep what they have */
    } finally {
      this.loading = false;
    }
  }

  private draw(runs: string[], flows: Flow[]): void {
    const many = runs.length > 1;
    const palette = store.palette();
    const name = (run: string, label: string) => (many ? `${store.heads.get(run)?.name}, ${label}` : label);
    this.groups.show({
      title: "Groups under way", note: "in flight: being generated; ready: waiting to be trained", axis: "time", fromZero: true,
      lines: flows.flatMap((flow, place) => [
        { label: name(runs[place], "in flight"), color: many ? store.color(runs[place]) : palette[0], x: flow.time, y: flow.in_flight },
        { label: name(runs[place], "ready"), color: many ? store.color(runs[place]) : palette[1], x: flow.time, y: flow.ready, dash: [4, 3] },
      ]),
    });
    this.versions.show({
      title: "Trained against served", note: "versions over time; the gap is what engines are behind", axis: "time", fromZero: false,
      lines: flows.flatMap((flow, place) => [
        { label: name(runs[place], "trained"), color: many ? store.color(runs[place]) : palette[0], x: flow.versions.map((row) => row[0]), y: flow.versions.map((row) => row[1]), steps: true },
        { label: name(runs[place], "served"), color: many ? store.color(runs[place]) : palette[1], x: flow.versions.map((row) => row[0]), y: flow.versions.map((row) => row[2]), dash: [4, 3], steps: true },
      ]),
    });
  }

  private drawDrops(): void {
    const heads = store.chosen.map((run) => store.heads.get(run)).filter((head) => head !== undefined);
    const reasons = [...new Set(heads.flatMap((head) => Object.keys(head.drops ?? {})))].sort();
    const cells = (reason: string) => heads.map((head) => h("td", { class: "number" }, formatNumber(head.drops?.[reason] ?? 0)));
    replace(
      this.drops, h("h3", {}, "Dropped samples by reason"),
      reasons.length
        ? h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "reason"), ...heads.map((head) => h("th", { class: "number" }, head.name)))),
            h("tbody", {}, ...reasons.map((reason) => h("tr", {}, h("td", {}, reason.replaceAll("_", " ")), ...cells(reason)))))
        : h("p", { class: "note" }, "No sample was dropped."),
      reasons.length ? h("p", {}, h("a", { href: `#/samples?${new URLSearchParams([...store.chosen.map((run) => ["run", run]), ["kind", "dropped"]])}` }, "look at dropped samples")) : null,
    );
  }
}

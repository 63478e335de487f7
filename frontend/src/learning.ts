// Learning: reward, losses, KL, entropy, lengths, ratios, validation; several runs over each other, seeds as bands.

import type { Chart } from "./api";
import { formatNumber, h, replace } from "./dom";
import { store } from "./store";
import { ChartGrid, makeCurveControls, type View } from "./views";

const ELSEWHERE = /^(lag|memory|gpu_|throughput|time|bias|drops|lag_samples|length)/;

export class Learning implements View {
  readonly element = h("div", { class: "view" });
  private controls = h("div", { class: "controls" });
  private search = h("input", { type: "search", id: "search", placeholder: "find a chart…", "aria-label": "find a chart", oninput: () => this.grid.draw() });
  private unchanged = h("section", { class: "card" });
  private grid = new ChartGrid(() => this.charts());

  constructor() {
    this.element.append(this.controls, this.grid.element, this.unchanged);
    this.update("chosen");
  }

  // Charts that are about learning, and one for every number of the trainer that has none; those that never change are listed.
  private charts(): Chart[] {
    const own = store.charts.filter((chart) => !chart.curves.every(([name]) => ELSEWHERE.test(name)));
    const known = new Set(store.charts.flatMap((chart) => chart.curves.map(([name]) => name)));
    const others = new Set<string>();
    for (const run of store.chosen)
      for (const name of Object.keys(store.curves.get(run)?.series ?? {}))
        if (name.startsWith("train/") && !known.has(name) && !/(_gb|_s|mfu|tflop|tflops|lag_max|lag_mean|\/reward)$/.test(name)) others.add(name);
    const flat = [...others].sort().map((name): [string, number | null] => [name, constant(name)]).filter(([, value]) => value !== null);
    for (const [name] of flat) others.delete(name);
    this.unchanged.hidden = !flat.length;
    replace(this.unchanged, h("h3", {}, "The same in every step"), h("dl", { class: "facts wide" }, ...flat.map(([name, value]) => h("div", { title: name }, h("dt", {}, title(name)), h("dd", {}, formatNumber(value))))));
    const more = [...others].sort().map((name): Chart => ({ title: title(name), curves: [[name, "trainer"]], note: name, kind: "line", from_zero: false }));
    const words = this.search.value.trim().toLowerCase();
    return [...own, ...more].filter((chart) => !words || `${chart.title} ${chart.note} ${chart.curves.flat().join(" ")}`.toLowerCase().includes(words));
  }

  update(what: string): void {
    if (what === "chosen" || what === "theme") replace(this.controls, makeCurveControls(() => this.grid.draw()), this.search);
    if (what !== "status") this.grid.update();
  }

  destroy(): void {
    this.grid.destroy();
  }
}

// Returns the value that a curve has in all steps of all chosen runs; null if there are several, or fewer than two steps.
function constant(name: string): number | null {
  const values = store.chosen.flatMap((run) => store.curves.get(run)?.series[name] ?? []).filter((value) => value !== null);
  return values.length > 1 && values.every((value) => value === values[0]) ? values[0] : null;
}

function title(name: string): string {
  const words = name.slice(6).replaceAll("_", " ");
  return words[0].toUpperCase() + words.slice(1);
}

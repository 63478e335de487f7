// Learning: reward, losses, KL, entropy, lengths, ratios, validation; several runs over each other, seeds as bands.

import type { Chart } from "./api";
import { h, replace } from "./dom";
import { store } from "./store";
import { ChartGrid, makeCurveControls, type View } from "./views";

const ELSEWHERE = /^(lag|memory|gpu_|throughput|time|bias|drops|lag_samples|length)/;

export class Learning implements View {
  readonly element = h("div", { class: "view" });
  private controls = h("div");
  private grid = new ChartGrid(() => this.charts());

  constructor() {
    this.element.append(this.controls, this.grid.element);
    this.update("chosen");
  }

  // Charts that are about learning, and one for every number of the trainer that has none.
  private charts(): Chart[] {
    const own = store.charts.filter((chart) => !chart.curves.every(([name]) => ELSEWHERE.test(name)));
    const known = new Set(store.charts.flatMap((chart) => chart.curves.map(([name]) => name)));
    const others = new Set<string>();
    for (const run of store.chosen)
      for (const name of Object.keys(store.curves.get(run)?.series ?? {}))
        if (name.startsWith("train/") && !known.has(name) && !/(_gb|_s|mfu|tflop|tflops|\/reward)$/.test(name)) others.add(name);
    const more = [...others].sort().map((name): Chart => ({ title: title(name), curves: [[name, "trainer"]], note: name, kind: "line", from_zero: false }));
    return [...own, ...more];
  }

  update(what: string): void {
    if (what === "chosen" || what === "theme") replace(this.controls, makeCurveControls(() => this.grid.draw()));
    if (what !== "status") this.grid.update();
  }

  destroy(): void {
    this.grid.destroy();
  }
}

function title(name: string): string {
  const words = name.slice(6).replaceAll("_", " ");
  return words[0].toUpperCase() + words.slice(1);
}

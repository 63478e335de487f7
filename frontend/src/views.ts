// The interface of a view, and the parts that several views share.

import type { Chart } from "./api";
import { ChartCard } from "./charts";
import { makePlot, type CurveOptions } from "./curves";
import { h } from "./dom";
import { store } from "./store";

export interface View {
  element: HTMLElement;
  update(what: string, run?: string): void;
  key?(event: KeyboardEvent): boolean;
  destroy(): void;
}

export const curveOptions: CurveOptions = { axis: "step", smooth: 1, bands: true };

// A grid of charts that is drawn anew when curves change, at most twice a second.
export class ChartGrid {
  readonly element = h("div", { class: "grid" });
  private cards = new Map<string, ChartCard>();
  private timer = 0;

  constructor(private readonly charts: () => Chart[]) {
    this.draw();
  }

  update(): void {
    if (this.timer) return;
    this.timer = window.setTimeout(() => {
      this.timer = 0;
      this.draw();
    }, 250);
  }

  draw(): void {
    const shown: HTMLElement[] = [];
    for (const chart of this.charts()) {
      const plot = makePlot(chart, curveOptions);
      if (!plot) continue;
      const key = chart.curves[0][0];
      let card = this.cards.get(key);
      if (!card) {
        card = new ChartCard();
        this.cards.set(key, card);
      }
      shown.push(card.element);
      if (card.element.parentElement !== this.element) this.element.append(card.element);
      card.show(plot);
    }
    for (const [key, card] of this.cards)
      if (!shown.includes(card.element)) {
        card.destroy();
        card.element.remove();
        this.cards.delete(key);
      }
    this.element.querySelector(".empty")?.remove();
    if (!shown.length) this.element.append(h("p", { class: "empty" }, "No step is done yet. Curves appear with the first one."));
  }

  destroy(): void {
    clearTimeout(this.timer);
    for (const card of this.cards.values()) card.destroy();
  }
}

export function makeCurveControls(redraw: () => void): HTMLElement {
  const choose = <T extends string>(label: string, values: [T, string][], now: T, set: (value: T) => void) => {
    const select = h("select", { "aria-label": label, onchange: () => { set(select.value as T); redraw(); } });
    for (const [value, text] of values) select.append(h("option", { value, selected: value === now }, text));
    return h("label", { class: "control" }, label, select);
  };
  const controls = h("div", { class: "controls" });
  controls.append(
    choose("over", [["step", "steps"], ["time", "time"]], curveOptions.axis, (value) => (curveOptions.axis = value)),
    choose("smooth", [["1", "not"], ["5", "5 steps"], ["20", "20 steps"], ["100", "100 steps"]], String(curveOptions.smooth), (value) => (curveOptions.smooth = Number(value))),
  );
  if (store.chosen.length > 1)
    controls.append(choose("seeds", [["yes", "as a band"], ["no", "each run"]], curveOptions.bands ? "yes" : "no", (value) => (curveOptions.bands = value === "yes")));
  return controls;
}

export const HEALTH_SIGNS: Record<string, string> = { good: "✓", watch: "!", bad: "✕" };
export const STATE_WORDS: Record<string, string> = {
  going: "running", done: "finished", stopped: "ended early", silent: "silent", simulated: "simulated", unread: "reading…", "": "unknown",
};

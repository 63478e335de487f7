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

const WINDOWS = [1, 2, 3, 5, 10, 20, 50, 100, 200, 500];
const REMEMBERED = "headway-curves";

export const curveOptions: CurveOptions = { axis: "step", smooth: 1, bands: true, ...recallOptions() };

function recallOptions(): Partial<CurveOptions> {
  try {
    return JSON.parse(localStorage.getItem(REMEMBERED) ?? "{}") as Partial<CurveOptions>;
  } catch {
    return {};
  }
}

function rememberOptions(): void {
  try {
    localStorage.setItem(REMEMBERED, JSON.stringify(curveOptions));
  } catch {
    /* a browser that stores nothing forgets how curves were drawn */
  }
}

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
    if (!shown.length) this.element.append(h("p", { class: "empty" }, !store.chosen.length ? "No run is chosen. Choose one above, or press r." : this.charts().length ? store.chosen.every((run) => store.curves.has(run)) ? "No step is done yet. Curves appear with the first one." : "reading the log…" : "No chart fits."));
  }

  destroy(): void {
    clearTimeout(this.timer);
    for (const card of this.cards.values()) card.destroy();
  }
}

export function makeCurveControls(redraw: () => void): HTMLElement {
  const choose = <T extends string>(label: string, values: [T, string][], now: T, set: (value: T) => void) => {
    const select = h("select", { "aria-label": label, onchange: () => { set(select.value as T); rememberOptions(); redraw(); } });
    for (const [value, text] of values) select.append(h("option", { value, selected: value === now }, text));
    return h("label", { class: "control" }, label, select);
  };
  const controls = h("div", { class: "controls" });
  controls.append(
    choose("over", [["step", "steps"], ["time", "time"], ["samples", "samples trained"], ["tokens", "tokens trained"]], curveOptions.axis, (value) => (curveOptions.axis = value)),
    makeSlider(redraw),
  );
  if (store.chosen.length > 1)
    controls.append(choose("seeds", [["yes", "as a band"], ["no", "each run"]], curveOptions.bands ? "yes" : "no", (value) => (curveOptions.bands = value === "yes")));
  return controls;
}

// Chooses over how many steps curves are averaged; the numbers of each step stay visible behind.
function makeSlider(redraw: () => void): HTMLElement {
  const said = h("output");
  const slider = h("input", { type: "range", min: 0, max: WINDOWS.length - 1, value: String(Math.max(0, WINDOWS.indexOf(curveOptions.smooth))), "aria-label": "smooth" });
  const describe = () => (said.textContent = curveOptions.smooth > 1 ? `mean of ${curveOptions.smooth} steps` : "off");
  slider.addEventListener("input", () => { curveOptions.smooth = WINDOWS[Number(slider.value)]; describe(); rememberOptions(); redraw(); });
  describe();
  return h("label", { class: "control" }, "smooth", slider, said);
}

export const HEALTH_SIGNS: Record<string, string> = { good: "✓", watch: "!", bad: "✕" };
export const STATE_WORDS: Record<string, string> = {
  going: "running", done: "finished", stopped: "ended early", silent: "no answer", simulated: "simulated", unread: "reading…", "": "unknown",
};

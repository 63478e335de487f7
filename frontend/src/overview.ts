// Overview: every run in one glance.

import type { Head } from "./api";
import { ChartCard, sparkline } from "./charts";
import { makePlot } from "./curves";
import { formatDuration, formatNumber, h, replace } from "./dom";
import { store } from "./store";
import { curveOptions, HEALTH_SIGNS, STATE_WORDS, type View } from "./views";

export class Overview implements View {
  readonly element = h("div", { class: "view overview" });
  private cards = h("div", { class: "runs" });
  private chart = new ChartCard();
  private timer = 0;

  constructor(private readonly open: (run: string) => void) {
    this.element.append(this.chart.element, this.cards);
    this.draw();
  }

  update(): void {
    if (!this.timer) this.timer = window.setTimeout(() => { this.timer = 0; this.draw(); }, 200);
  }

  destroy(): void {
    clearTimeout(this.timer);
    this.chart.destroy();
  }

  private draw(): void {
    const reward = store.charts.find((chart) => chart.kind === "reward");
    const plot = reward ? makePlot(reward, { ...curveOptions, axis: "step" }) : null;
    this.chart.element.hidden = !plot;
    if (plot) this.chart.show({ ...plot, tall: true });
    const heads = [...store.heads.values()].sort((one, other) => rank(one) - rank(other));
    this.element.classList.toggle("single", heads.length === 1 && plot !== null);
    const focused = document.activeElement?.getAttribute("data-run");
    replace(this.cards, ...heads.map((head) => this.makeCard(head)));
    if (focused) this.cards.querySelector<HTMLElement>(`[data-run="${CSS.escape(focused)}"]`)?.focus();
    if (!heads.length) this.cards.append(h("p", { class: "empty" }, `No run was found in ${store.root}. One appears here as soon as it starts: headway train run.yaml`));
  }

  private makeCard(head: Head): HTMLElement {
    const chosen = store.chosen.includes(head.id);
    const [sign, said] = head.health ?? ["good", ""];
    const done = head.steps ? Math.min(1, head.step / head.steps) : 0;
    const color = chosen ? store.color(head.id) : store.dark ? "#8b95a5" : "#7a8696";
    const box = h("input", {
      type: "checkbox", checked: chosen, "aria-label": `compare ${head.name}`,
      onchange: () => store.choose(chosen ? store.chosen.filter((run) => run !== head.id) : [...store.chosen, head.id]),
    });
    const name = h("button", { class: "name", "data-run": head.id, onclick: () => this.open(head.id) }, head.name);
    if (head.state === "unread") return h("article", { class: "card run" }, h("header", {}, box, name, pill(head.state)));
    return h(
      "article", { class: `card run${chosen ? " chosen" : ""}`, style: { borderLeftColor: color } },
      h("header", {}, box, name, pill(head.state, head.condition)),
      h("div", { class: "bar", role: "progressbar", "aria-valuenow": Math.round(done * 100), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "steps" },
        h("i", { style: { width: `${done * 100}%`, background: color } })),
      h("p", { class: "progress" }, h("b", {}, `step ${head.step.toLocaleString("en-US")}`), head.steps ? ` of ${head.steps.toLocaleString("en-US")}` : "", ` · ${formatDuration(head.duration_s)}`,
        head.left_s !== null ? h("span", { class: "left" }, `${formatDuration(head.left_s)} left`) : null),
      h("div", { class: "reward" }, fact("reward", formatNumber(head.reward), true), fact("held-out", head.held_out ? formatNumber(head.held_out[1]) : "–", true), sparkline(head.spark ?? [], color)),
      h("dl", { class: "facts" }, pair("lag", formatNumber(head.lag)), pair("tokens/s", formatNumber(head.tokens_per_s)), pair("s/step", formatNumber(head.step_s)), pair("dropped", formatNumber(sum(head.drops)))),
      h("p", { class: `health ${sign}` }, h("span", { class: "sign", "aria-hidden": "true" }, HEALTH_SIGNS[sign] ?? "?"), said),
      head.known < 1 ? h("p", { class: "note" }, `reading the log: ${Math.round(head.known * 100)} %`) : null,
    );
  }
}

function rank(head: Head): number {
  return ["going", "silent", "stopped", "done", "simulated"].indexOf(head.state);
}

function pill(state: string, condition = ""): HTMLElement {
  return h("span", { class: `pill ${state}` }, condition.startsWith("was killed") ? "killed" : (STATE_WORDS[state] ?? state));
}

function fact(name: string, value: string, large = false): HTMLElement {
  return h("div", { class: large ? "fact large" : "fact" }, h("b", {}, value), h("span", {}, name));
}

function pair(name: string, value: string): HTMLElement {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

function sum(counts: Record<string, number>): number {
  return Object.values(counts ?? {}).reduce((total, one) => total + one, 0);
}

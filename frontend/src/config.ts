// Config: every value and where it comes from, and what differs between runs.

import { ask } from "./api";
import { debounce, h, replace } from "./dom";
import { store } from "./store";
import type { View } from "./views";

interface Configuration {
  rows: [string, unknown, string][];
  facts: [string, string][];
}

export class Config implements View {
  readonly element = h("div", { class: "view" });
  private search = h("input", { type: "search", placeholder: "find an option…", "aria-label": "find an option", id: "search" });
  private which = h("select", { "aria-label": "which options" });
  private body = h("div", { class: "view" });
  private found: Configuration[] = [];
  private runs: string[] = [];

  constructor() {
    this.search.addEventListener("input", debounce(() => this.draw(), 120));
    this.which.addEventListener("change", () => this.draw());
    this.element.append(h("div", { class: "controls" }, this.search, this.which), this.body);
    void this.load();
  }

  update(what: string): void {
    if (what === "chosen") void this.load();
  }

  destroy(): void {}

  private async load(): Promise<void> {
    this.runs = [...store.chosen];
    this.found = await Promise.all(this.runs.map((run) => ask<Configuration>("run/config", { run }).catch(() => ({ rows: [], facts: [] }))));
    const options: [string, string][] = [["set", "set, or derived from what was set"], ["all", "every option"]];
    if (this.runs.length > 1) options.unshift(["different", "what differs"]);
    replace(this.which, ...options.map(([value, text]) => h("option", { value }, text)));
    this.draw();
  }

  private draw(): void {
    const words = this.search.value.toLowerCase();
    const tables = this.found.map((one) => new Map(one.rows.map(([key, value, origin]) => [key, { value: show(value), origin }])));
    const keys = [...new Set(tables.flatMap((table) => [...table.keys()]))].filter((key) => {
      const cells = tables.map((table) => table.get(key));
      if (words && !key.toLowerCase().includes(words) && !cells.some((cell) => cell?.value.toLowerCase().includes(words))) return false;
      if (this.which.value === "all") return true;
      if (this.which.value === "different") return new Set(cells.map((cell) => cell?.value)).size > 1;
      return cells.some((cell) => cell && cell.origin !== "default");
    });
    const heads = this.runs.map((run) => h("th", {}, h("i", { class: "dot", style: { background: store.color(run) } }), store.heads.get(run)?.name ?? run));
    const single = this.runs.length === 1;
    const rows = keys.map((key) => {
      const cells = tables.map((table) => table.get(key));
      const differs = new Set(cells.map((cell) => cell?.value)).size > 1;
      return h("tr", { class: differs ? "differs" : "" }, h("td", { class: "mono" }, key),
        ...cells.flatMap((cell) => [h("td", { class: "mono value" }, cell?.value ?? "–", single ? null : h("small", {}, cell?.origin ?? "")), ...(single ? [h("td", { class: "origin" }, cell?.origin ?? "")] : [])]));
    });
    const facts = single && this.found[0]?.facts.length
      ? h("dl", { class: "card facts wide" }, ...this.found[0].facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))
      : null;
    replace(this.body, facts,
      rows.length
        ? h("div", { class: "card scroll" }, h("table", { class: "config" }, h("thead", {}, h("tr", {}, h("th", {}, `option (${rows.length})`), ...heads, single ? h("th", {}, "comes from") : null)), h("tbody", {}, ...rows)))
        : h("p", { class: "empty" }, this.found.some((one) => one.rows.length) ? "No option fits." : this.runs.length ? "This run has left no configuration." : "No run is chosen. Choose one above, or press r."));
  }
}

function show(value: unknown): string {
  if (value === null) return "null";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

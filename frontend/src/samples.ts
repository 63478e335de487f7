// Samples: search and filters, a group side by side, turns, and tokens coloured by what is known of them.

import { ask, type Group, type Member, type SampleRow, type Turn } from "./api";
import { debounce, formatNumber, h, replace } from "./dom";
import { store } from "./store";
import type { View } from "./views";

type Coloring = "nothing" | "log-probability" | "version" | "advantage" | "mask";
const COLORINGS: Coloring[] = ["log-probability", "version", "advantage", "mask", "nothing"];
const DROP_REASONS: Record<string, string> = {
  stale_in_flight: "the staleness bound passed while it was still being generated; the finished members are below",
  stale_in_queue: "it was finished, but the staleness bound passed while it waited",
  surplus_member: "a redundant member of a group that filled without it",
  surplus_group: "a redundant prompt of a batch that filled without it",
  zero_variance: "all rewards of the group are equal, so it has no gradient",
  filtered: "a stage of a plugin dropped it, or query_filter_config rejected its rewards",
  engine_failed: "the engine failed",
  environment_failed: "the environment failed",
  reward_failed: "the reward raised an error, was late or gave no number",
  scoring_failed: "its log-probabilities could not be computed",
  group_failed: "another member of the group failed finally, and groups are trained whole",
  lost_lineage: "its weights were undone by a crash, and it is too far from those that are left",
  damaged_record: "what the ledger had stored of it was damaged on the disk",
};
const FILTERS = ["step", "reward", "lag"] as const;

interface Picture {
  prompt: string;
  shots: { id: number; step: number; reward: number | null }[];
}

export class Samples implements View {
  readonly element = h("div", { class: "view samples" });
  private run = "";
  private form = h("form", { class: "filters card", onsubmit: (event: Event) => event.preventDefault() });
  private list = h("ol", { class: "list" });
  private detail = h("section", { class: "detail" });
  private said = h("p", { class: "note" }, "reading the samples…");
  private pictures = h("section", { class: "pictures" });
  private inputs = new Map<string, HTMLInputElement | HTMLSelectElement>();
  private coloring: Coloring = "log-probability";
  private group: Group | null = null;
  private open = "";
  private number = 0;
  private newest = 0;
  private refreshLater = debounce(() => void this.search(false), 900);

  constructor() {
    this.makeForm();
    this.inputs.get("kind")!.value = new URLSearchParams(location.hash.split("?")[1] ?? "").get("kind") ?? "";
    this.element.append(this.form, h("div", { class: "split" }, h("div", { class: "card results" }, this.said, this.list), this.detail), this.pictures);
    this.update("chosen");
  }

  update(what: string, run?: string): void {
    if (what === "chosen" || this.run === "") {
      this.run = store.chosen.includes(this.run) ? this.run : (store.chosen[0] ?? "");
      this.makeForm();
      if (this.run) { void this.search(true); void this.loadPictures(); }
    } else if (what === "curves" && run === this.run) {
      const step = store.heads.get(run)?.step ?? 0;
      if (step !== this.newest) { this.newest = step; this.refreshLater(); void this.loadPictures(); }
    } else if (what === "theme") this.showGroup();
  }

  destroy(): void {}

  private makeForm(): void {
    const later = debounce(() => void this.search(true), 200);
    const before = new Map([...this.inputs].map(([name, input]) => [name, input.value]));
    this.inputs.clear();
    const input = (name: string, attributes: Record<string, unknown>) => {
      const made = h("input", { ...attributes, "aria-label": attributes["aria-label"] ?? name, value: before.get(name) ?? "", oninput: later });
      this.inputs.set(name, made);
      return made;
    };
    const select = (name: string, values: [string, string][], act: () => void) => {
      const made = h("select", { "aria-label": name, onchange: act });
      for (const [value, text] of values) made.append(h("option", { value }, text));
      made.value = before.get(name) ?? values[0]?.[0] ?? "";
      this.inputs.set(name, made);
      return made;
    };
    const range = (name: string) => h("span", { class: "range" }, name, input(`${name}_from`, { type: "number", step: "any", placeholder: "from", "aria-label": `${name} from` }), "–", input(`${name}_to`, { type: "number", step: "any", placeholder: "to", "aria-label": `${name} to` }));
    const kinds: [string, string][] = [["", "all samples"], ["group", "trained groups"], ["dropped", "dropped groups"], ["held_out", "held-out answers"], ["best", "best of a group"], ["worst", "worst of a group"]];
    const runs = store.chosen.map((run): [string, string] => [run, store.heads.get(run)?.name ?? run]);
    const chooser = select("run", runs, () => { this.run = chooser.value; this.group = null; void this.search(true); void this.loadPictures(); });
    chooser.value = this.run;
    replace(this.form,
      input("text", { type: "search", placeholder: "search prompts and answers…", id: "search", class: "wide", "aria-label": "search prompts and answers" }),
      store.chosen.length > 1 ? chooser : null,
      select("kind", kinds, () => void this.search(true)),
      ...FILTERS.map(range),
      h("span", { class: "range" }, "task", input("task", { type: "number", placeholder: "any" })),
      h("button", { type: "button", class: "plain", onclick: () => { for (const [name, one] of this.inputs) if (name !== "run") one.value = ""; void this.search(true); } }, "clear"));
  }

  private async search(first: boolean): Promise<void> {
    const number = (this.number += 1);
    const query: Record<string, string> = { run: this.run };
    for (const [name, input] of this.inputs) if (name !== "run") query[name] = input.value;
    const found = await ask<{ rows: SampleRow[]; whole: boolean; groups: number; samples: number }>("run/samples", query).catch(() => null);
    if (!found || number !== this.number) return;
    this.said.textContent = found.rows.length
      ? `${found.rows.length}${found.whole ? "" : " newest"} of ${formatNumber(found.samples)} samples${found.groups ? ` in ${formatNumber(found.groups)} groups` : ""}`
      : this.inputs.get("kind")!.value === "dropped" ? "No dropped sample is kept. Runs keep the first two groups of each step and reason, as far as they were finished; simulated runs and those of older versions keep none."
      : store.heads.get(this.run)?.has_samples ? "No sample fits." : "This run has logged no samples.";
    replace(this.list, ...found.rows.map((row) => this.makeRow(row)));
    if (first && found.rows.length && !found.rows.some((row) => row.id === this.open)) void this.openGroup(found.rows[0].id);
    if (!found.rows.length && first) { this.group = null; replace(this.detail); }
  }

  private makeRow(row: SampleRow): HTMLElement {
    return h("li", {}, h("button", { class: row.id === this.open ? "sample chosen" : "sample", "data-sample": row.id, onclick: () => void this.openGroup(row.id) },
      h("span", { class: "meta" }, reward(row.reward), h("span", { class: "facts-line" }, [`step ${row.step}`, row.dropped ? `dropped: ${row.dropped.replaceAll("_", " ")}` : "", row.group !== null ? `group ${row.group}` : row.kind.replace("_", "-"), row.lag !== null ? `lag ${row.lag}` : "", row.length !== null ? `${row.length} tokens` : ""].filter(Boolean).join(" · "))),
      h("span", { class: "prompt" }, row.prompt || "(no prompt)"), h("span", { class: "answer" }, row.answer || "(empty)")));
  }

  private async openGroup(id: string): Promise<void> {
    this.open = id;
    for (const button of this.list.querySelectorAll("button")) button.classList.toggle("chosen", button.dataset.sample === id);
    if (!this.group) replace(this.detail, h("p", { class: "empty" }, "opening the sample…"));
    const found = await ask<Group>("run/group", { run: this.run, sample: id }).catch(() => null);
    if (id !== this.open) return;
    this.group = found;
    if (found) this.showGroup();
    else replace(this.detail, h("p", { class: "empty" }, "This sample cannot be read; the server is gone, or its file has changed."));
  }

  private showGroup(): void {
    const group = this.group;
    if (!group) return;
    const select = h("select", { "aria-label": "colour tokens by", onchange: () => { this.coloring = select.value as Coloring; this.showGroup(); } });
    for (const one of COLORINGS) select.append(h("option", { value: one, selected: one === this.coloring }, one));
    const hasTokens = group.columns.some((member) => member.turns.some((turn) => turn.tokens?.length));
    const versions = [...new Set(group.columns.flatMap((member) => member.turns.flatMap((turn) => (turn.versions ?? []).map((one) => one[0]))))].sort((one, other) => one - other);
    const most = Math.max(1e-9, ...group.columns.map((member) => Math.abs(member.advantage ?? 0)));
    replace(this.detail,
      h("header", { class: "card" }, h("h3", {}, group.title), group.dropped ? h("p", { class: "dropped" }, h("b", {}, group.dropped.replaceAll("_", " ")), `: ${DROP_REASONS[group.dropped] ?? "not trained"}`) : null, hasTokens ? h("label", { class: "control" }, "colour tokens by", select) : null, hasTokens ? this.makeScale(versions) : null,
        h("div", { class: "task" }, group.prompt ? h("b", {}, "task") : null, group.prompt ? h("pre", {}, group.prompt) : null, group.expected !== null && group.expected !== undefined ? h("p", {}, h("b", {}, "expected "), String(group.expected)) : null)),
      h("div", { class: "columns" }, ...group.columns.map((member, place) => this.makeMember(member, place === group.chosen, versions, most))),
      group.left_out ? h("p", { class: "note" }, `${group.left_out} more members were not logged.`) : null);
  }

  private makeMember(member: Member, chosen: boolean, versions: number[], most: number): HTMLElement {
    const facts = [member.advantage !== undefined ? `advantage ${member.advantage > 0 ? "+" : ""}${formatNumber(member.advantage)}` : "", member.lag !== undefined ? `lag ${member.lag}` : "", member.length !== undefined ? `${member.length} tokens` : "", member.finish ?? ""];
    const parts = Object.entries(member.parts ?? {});
    return h("article", { class: chosen ? "member card chosen" : "member card" },
      h("header", {}, reward(member.reward), h("b", {}, member.sample), h("span", { class: "note" }, facts.filter(Boolean).join(" · "))),
      parts.length > 1 ? h("p", { class: "note" }, parts.map(([name, value]) => `${name} ${formatNumber(value)}`).join(" + ")) : null,
      ...member.turns.map((turn, place) => this.makeTurn(turn, place, member, versions, most)));
  }

  private makeTurn(turn: Turn, place: number, member: Member, versions: number[], most: number): HTMLElement {
    const many = member.turns.length > 1;
    const shown = h("div", { class: "turn" });
    if (many) shown.append(h("h4", {}, `turn ${place + 1}`, turn.reward ? h("span", { class: "note" }, ` reward ${formatNumber(turn.reward)}`) : ""));
    if (turn.observation) shown.append(h("pre", { class: this.coloring === "mask" ? "seen masked" : "seen", title: "what the policy saw; not trained" }, turn.observation));
    const answer = h("pre", { class: "said" });
    if (turn.tokens?.length) {
      const made = (turn.versions ?? []).flatMap(([version, count]) => new Array<number>(Math.min(count, 4096)).fill(version));
      turn.tokens.forEach((token, number) => {
        const logp = turn.logps?.[number];
        const span = h("span", { class: "token", title: `${JSON.stringify(token)}  log-probability ${logp ?? "–"}${logp !== undefined ? ` (${(Math.exp(logp) * 100).toFixed(1)} %)` : ""}, version ${made[number] ?? "–"}, advantage ${member.advantage ?? "–"}, trained` }, token);
        const background = this.pick(logp, made[number], member.advantage, versions, most);
        if (background) span.style.backgroundColor = background;
        answer.append(span);
      });
      if (turn.left_out) answer.append(h("span", { class: "note" }, ` … ${turn.left_out} more tokens`));
    } else answer.append(turn.text ?? "");
    shown.append(answer);
    return shown;
  }

  private pick(logp: number | undefined, version: number | undefined, advantage: number | undefined, versions: number[], most: number): string {
    const alpha = store.dark ? 0.55 : 0.4;
    if (this.coloring === "log-probability" && logp !== undefined) return surprise(logp);
    if (this.coloring === "version" && version !== undefined) {
      const palette = ["0,114,178", "230,159,0", "0,158,115", "204,121,167", "86,180,233", "213,94,0"];
      return `rgba(${palette[versions.indexOf(version) % palette.length]},${alpha})`;
    }
    if (this.coloring === "advantage" && advantage !== undefined) {
      const part = Math.min(1, Math.abs(advantage) / most);
      return advantage >= 0 ? `rgba(0,114,178,${(alpha * part).toFixed(3)})` : `rgba(213,94,0,${(alpha * part).toFixed(3)})`;
    }
    return this.coloring === "mask" ? `rgba(0,158,115,${alpha * 0.7})` : "";
  }

  private makeScale(versions: number[]): HTMLElement {
    const item = (color: string, text: string) => h("span", { class: "key" }, h("i", { style: { background: color } }), text);
    const items: Record<Coloring, () => HTMLElement[]> = {
      "log-probability": () => [item(surprise(0), "certain"), item(surprise(-1), "37 %"), item(surprise(-2.3), "10 %"), item(surprise(-4.6), "1 %")],
      version: () => versions.slice(0, 8).map((version) => item(this.pick(undefined, version, undefined, versions, 1), `version ${version}`)),
      advantage: () => [item("rgba(0,114,178,.5)", "better than its group"), item("rgba(213,94,0,.5)", "worse")],
      mask: () => [item("rgba(0,158,115,.35)", "trained"), h("span", { class: "key" }, h("i", { class: "hatched" }), "seen only")],
      nothing: () => [],
    };
    return h("span", { class: "legend" }, ...items[this.coloring]());
  }

  private async loadPictures(): Promise<void> {
    if (!store.heads.get(this.run)?.has_pictures) { replace(this.pictures); return; }
    const found = await ask<Picture[]>("run/pictures", { run: this.run }).catch(() => []);
    if (!found.length) { replace(this.pictures); return; }
    const steps = [...new Set(found.flatMap((one) => one.shots.map((shot) => shot.step)))].sort((one, other) => one - other);
    const slider = h("input", { type: "range", min: 0, max: steps.length - 1, value: String(steps.length - 1), "aria-label": "step of the later picture" });
    const label = h("b");
    const rows = h("div", { class: "pairs" });
    const picture = (shot: Picture["shots"][number], prompt: string) => h("figure", {}, h("img", { src: `/api/run/picture?run=${encodeURIComponent(this.run)}&id=${shot.id}`, alt: `${prompt}, step ${shot.step}`, loading: "lazy" }), h("figcaption", {}, `step ${shot.step} · `, reward(shot.reward)));
    const draw = () => {
      const step = steps[Number(slider.value)];
      label.textContent = `step ${step}`;
      replace(rows, ...found.slice(0, 24).map((one) => {
        const later = one.shots.findLast((shot) => shot.step <= step) ?? one.shots[0];
        return h("article", { class: "card pair" }, h("p", {}, one.prompt), h("div", {}, picture(one.shots[0], one.prompt), h("span", { "aria-hidden": "true" }, "→"), picture(later, one.prompt)));
      }));
    };
    slider.addEventListener("input", draw);
    replace(this.pictures, h("header", { class: "controls" }, h("h3", {}, "Pictures, before and after"), h("label", { class: "control" }, "until ", label, slider)), rows);
    draw();
  }
}

function reward(value: number | null): HTMLElement {
  const kind = value === null ? "none" : value > 0.5 ? "high" : value > 0 ? "some" : "low";
  return h("span", { class: `score ${kind}` }, value === null ? "no score" : formatNumber(value));
}

// From white, for what was certain, to deep orange, for what was a surprise.
function surprise(logp: number): string {
  const part = Math.min(1, Math.max(0, -logp / 5));
  return store.dark ? `rgba(245,137,78,${(part * 0.75).toFixed(3)})` : `rgba(213,94,0,${(part * 0.7).toFixed(3)})`;
}

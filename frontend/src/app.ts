// The shell of the page: navigation, chosen runs, theme, keyboard. The address holds the view and the chosen runs.

import { Config } from "./config";
import { h, replace } from "./dom";
import { Headway } from "./headway";
import { Health } from "./health";
import { Learning } from "./learning";
import { Overview } from "./overview";
import { Samples } from "./samples";
import { MOST_CHOSEN, store } from "./store";
import { Timeline } from "./timeline";
import { STATE_WORDS, type View } from "./views";

const VIEWS: [string, string, () => View][] = [
  ["overview", "Overview", () => new Overview((run) => { store.choose([run]); go("learning"); })],
  ["timeline", "Timeline", () => new Timeline()],
  ["learning", "Learning", () => new Learning()],
  ["headway", "Headway", () => new Headway()],
  ["samples", "Samples", () => new Samples()],
  ["health", "Health", () => new Health()],
  ["config", "Config", () => new Config()],
];
const ICONS: Record<string, string> = { overview: "◫", timeline: "☰", learning: "↗", headway: "⇥", samples: "¶", health: "♥", config: "⚙" };

const main = h("main", { id: "main", tabindex: -1 });
const nav = h("nav", { "aria-label": "views" });
const picker = h("details", { class: "picker" });
const live = h("span", { class: "live", role: "status" });
const help = h("dialog", { class: "card help" });
let current = "";
let view: View | null = null;

function readAddress(): { name: string; runs: string[] } {
  const [name, query] = location.hash.slice(2).split("?");
  return { name: VIEWS.some((one) => one[0] === name) ? name : "overview", runs: new URLSearchParams(query ?? "").getAll("run") };
}

function writeAddress(): void {
  const words = new URLSearchParams();
  for (const run of store.chosen) words.append("run", run);
  history.replaceState(null, "", `#/${current}${store.chosen.length ? `?${words}` : ""}`);
}

function go(name: string): void {
  if (name === current) return;
  current = name;
  view?.destroy();
  view = VIEWS.find((one) => one[0] === name)![2]();
  replace(main, view.element);
  main.dataset.view = name;
  document.title = `${name[0].toUpperCase()}${name.slice(1)} · Headway`;
  for (const link of nav.querySelectorAll("button")) {
    const here = link.dataset.view === name;
    link.classList.toggle("here", here);
    if (here) { link.setAttribute("aria-current", "page"); link.scrollIntoView({ block: "nearest", inline: "nearest" }); }
    else link.removeAttribute("aria-current");
  }
  writeAddress();
  window.scrollTo(0, 0);
}

function drawPicker(): void {
  const open = picker.open;
  const heads = [...store.heads.values()];
  const chips = store.chosen.slice(0, 3).map((run) => h("span", { class: "chip" }, h("i", { class: "dot", style: { background: store.color(run) } }), store.heads.get(run)?.name ?? run));
  const more = store.chosen.length > 3 ? h("span", { class: "chip more" }, `+${store.chosen.length - 3}`) : null;
  const rows = heads.map((head) => {
    const chosen = store.chosen.includes(head.id);
    const box = h("input", { type: "checkbox", checked: chosen, onchange: () => store.choose(chosen ? store.chosen.filter((run) => run !== head.id) : [...store.chosen, head.id]) });
    return h("label", {}, box, h("i", { class: "dot", style: { background: chosen ? store.color(head.id) : "transparent" } }), h("span", { class: "runname" }, head.id), h("small", {}, STATE_WORDS[head.state] ?? head.state));
  });
  replace(picker, h("summary", { "aria-label": "choose runs" }, ...(chips.length ? chips : ["choose runs"]), more), h("div", { class: "menu card" }, ...rows, heads.length ? null : h("p", { class: "note" }, "There is no run yet."), store.chosen.length >= MOST_CHOSEN ? h("p", { class: "note" }, `At most ${MOST_CHOSEN} runs are drawn at once.`) : null));
  picker.open = open;
}

function drawLive(): void {
  const going = store.chosen.some((run) => store.heads.get(run)?.state === "going");
  live.className = `live ${store.live ? (going ? "on" : "idle") : "off"}`;
  live.textContent = store.live ? (going ? "live" : "up to date") : "not connected";
  live.dataset.arrived = String(store.arrived);
}

function onKey(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") { picker.open = false; help.close(); target.blur(); return; }
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) && (target as HTMLInputElement).type !== "checkbox") return;
  const number = Number(event.key);
  if (number >= 1 && number <= VIEWS.length) go(VIEWS[number - 1][0]);
  else if (event.key === "/") { event.preventDefault(); main.querySelector<HTMLElement>("#search")?.focus(); }
  else if (event.key === "t") store.setTheme(store.dark ? "light" : "dark");
  else if (event.key === "r") { picker.open = !picker.open; picker.querySelector<HTMLElement>(picker.open ? "input" : "summary")?.focus(); }
  else if (event.key === "?") help.open ? help.close() : help.showModal();
  else if (!(target instanceof HTMLCanvasElement) && view?.key?.(event)) event.preventDefault();
}

function makeHelp(): void {
  const rows: [string, string][] = [["1 – 7", "views"], ["r", "choose runs"], ["/", "search"], ["t", "light or dark"], ["← → + − 0", "timeline: move, zoom, everything"], ["drag, double click", "charts: zoom in, zoom out"], ["Esc", "close"]];
  replace(help, h("h3", {}, "Keys"), h("dl", { class: "keys" }, ...rows.flatMap(([key, text]) => [h("dt", {}, key), h("dd", {}, text)])), h("button", { class: "plain", onclick: () => help.close() }, "close"));
}

async function begin(): Promise<void> {
  try {
    const theme = localStorage.getItem("headway-theme");
    if (theme) document.documentElement.dataset.theme = theme;
  } catch { /* a browser that stores nothing has no theme to remember */ }
  for (const [place, [name, label]] of VIEWS.entries())
    nav.append(h("button", { "data-view": name, title: `${label} (${place + 1})`, onclick: () => go(name) }, h("span", { class: "icon", "aria-hidden": "true" }, ICONS[name]), label));
  const theme = h("button", { class: "icon", "aria-label": "light or dark (t)", title: "light or dark (t)", onclick: () => store.setTheme(store.dark ? "light" : "dark") }, "◐");
  const keys = h("button", { class: "icon", "aria-label": "keys (?)", title: "keys (?)", onclick: () => help.showModal() }, "?");
  makeHelp();
  replace(document.getElementById("app")!,
    h("a", { class: "skip", href: "#main", onclick: (event: Event) => { event.preventDefault(); main.focus(); } }, "skip to the content"),
    h("header", { class: "top" }, h("span", { class: "brand" }, h("img", { src: "/static/icon.svg", alt: "", width: 22, height: 22 }), "Headway"), picker, live, theme, keys), nav, main, help);
  document.addEventListener("keydown", onKey);
  document.addEventListener("click", (event) => { if (!picker.contains(event.target as Node)) picker.open = false; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => store.setTheme(""));
  const { name, runs } = readAddress();
  await store.start(runs);
  let menu = "";
  store.on((what, run) => {
    const now = JSON.stringify([store.chosen, store.dark, [...store.heads.values()].map((head) => [head.id, head.state])]);
    if (now !== menu) { menu = now; drawPicker(); }
    if (what === "chosen") writeAddress();
    drawLive();
    view?.update(what, run);
  });
  drawPicker();
  drawLive();
  go(name);
  window.addEventListener("hashchange", () => {
    const wanted = readAddress();
    const known = wanted.runs.filter((run) => store.heads.has(run));
    if (known.length && known.join() !== store.chosen.join()) store.choose(known);
    go(wanted.name);
  });
}

void begin();

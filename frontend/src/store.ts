// The state of the page: runs, which of them are chosen, their curves, and what is new about them.

import { ask, type Chart, type Curves, type Head, type News, type Point, type Status } from "./api";

export type Listener = (what: "runs" | "chosen" | "curves" | "status" | "theme", run?: string) => void;

export const MOST_CHOSEN = 12;
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#aa4499", "#b58900", "#3a9bd9", "#6b6b6b", "#882255"];
const DARK = ["#56b4e9", "#f5894e", "#2fc59a", "#e08bc0", "#f0c63c", "#9cc9ff", "#b0b7c3", "#ff9bb0"];

class Store {
  root = "";
  charts: Chart[] = [];
  heads = new Map<string, Head>();
  chosen: string[] = [];
  curves = new Map<string, Curves>();
  status = new Map<string, Status | null>();
  live = false;
  arrived = 0;
  private colors = new Map<string, number>();
  private listeners = new Set<Listener>();
  private stream: EventSource | null = null;

  on(listener: Listener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  private tell(what: Parameters<Listener>[0], run?: string): void {
    for (const listener of [...this.listeners]) listener(what, run);
  }

  get dark(): boolean {
    const set = document.documentElement.dataset.theme;
    return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  setTheme(theme: string): void {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    try {
      localStorage.setItem("headway-theme", theme);
    } catch {
      /* a browser that stores nothing forgets the theme */
    }
    this.tell("theme");
  }

  palette(): string[] {
    return this.dark ? DARK : LIGHT;
  }

  // A run keeps its colour for as long as the page is open, whichever others are chosen.
  color(run: string): string {
    const palette = this.palette();
    if (!this.colors.has(run)) {
      const beside = new Set(this.chosen.map((one) => this.colors.get(one)));
      const used = new Set(this.colors.values());
      const found = [palette.findIndex((_, place) => !used.has(place)), palette.findIndex((_, place) => !beside.has(place))].find((place) => place >= 0);
      this.colors.set(run, found ?? this.colors.size % palette.length);
    }
    return palette[this.colors.get(run)!];
  }

  async start(chosen: string[]): Promise<void> {
    const found = await ask<{ root: string; runs: Head[]; charts: Chart[] }>("runs");
    this.root = found.root;
    this.charts = found.charts;
    for (const head of found.runs) this.heads.set(head.id, head);
    const known = chosen.filter((run) => this.heads.has(run));
    this.choose(known.length ? known : [...this.heads.keys()].slice(0, 1));
    this.tell("runs");
  }

  choose(runs: string[]): void {
    const before = this.chosen.map((run) => this.colors.get(run));
    const added = runs.filter((run) => !this.chosen.includes(run));
    for (const run of added) if (before.includes(this.colors.get(run))) this.colors.delete(run);
    this.chosen = [...new Set(runs)].slice(0, MOST_CHOSEN);
    for (const run of this.chosen) this.color(run);
    this.follow();
    this.tell("chosen");
    for (const run of this.chosen) if (!this.curves.has(run)) void this.load(run);
  }

  async load(run: string): Promise<void> {
    try {
      this.curves.set(run, await ask<Curves>("run/curves", { run }));
      this.tell("curves", run);
    } catch (error) {
      console.warn(`the curves of ${run} cannot be read: ${error}`);
    }
  }

  private follow(): void {
    this.stream?.close();
    const words = new URLSearchParams();
    for (const run of this.chosen) words.append("run", run);
    const stream = new EventSource(`/api/stream?${words}`);
    this.stream = stream;
    stream.onopen = () => this.setLive(true);
    stream.onerror = () => this.setLive(false);
    stream.onmessage = (message) => this.take(JSON.parse(message.data) as News);
  }

  private setLive(live: boolean): void {
    if (this.live !== live) {
      this.live = live;
      this.tell("status");
    }
  }

  private take(news: News): void {
    this.arrived += 1;
    if (news.heads) {
      const runs = new Map(news.heads.map((head) => [head.id, head]));
      for (const head of runs.values()) this.heads.set(head.id, head);
    }
    for (const [run, one] of Object.entries(news.runs ?? {})) {
      this.heads.set(run, one.head);
      this.status.set(run, one.status);
      if (one.reload) void this.load(run);
      else if (one.points?.length) this.add(run, one.points);
      this.tell("status", run);
    }
    if (news.heads || news.runs) this.tell("runs");
  }

  private add(run: string, points: Point[]): void {
    const curves = this.curves.get(run);
    if (!curves) return;
    for (const point of points) addPoint(curves, point);
    this.tell("curves", run);
  }
}

// Adds a point to the end of the curves; steps that were lost and are made again go first.
function addPoint(curves: Curves, point: Point): void {
  if (point.rewind) {
    let place = curves.step.length;
    while (place > 0 && curves.step[place - 1] >= point.step) place -= 1;
    curves.step.length = curves.time.length = place;
    for (const values of Object.values(curves.series)) values.length = place;
    curves.held_out = curves.held_out.filter((one) => one.step < point.step);
  }
  if (point.held_out) {
    curves.held_out = [...curves.held_out.filter((one) => one.step !== point.step), point];
  } else if (Object.keys(point.values).length) {
    for (const name of Object.keys(point.values))
      curves.series[name] ??= new Array<number | null>(curves.step.length).fill(null);
    curves.step.push(point.step);
    curves.time.push(point.time);
    for (const [name, values] of Object.entries(curves.series)) values.push(point.values[name] ?? null);
  }
}

export const store = new Store();

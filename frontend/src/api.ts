// What the server sends, and how it is asked.

export interface Head {
  id: string;
  name: string;
  state: string;
  said?: string;
  condition?: string;
  step: number;
  steps: number;
  left_s: number | null;
  duration_s: number;
  reward: number | null;
  held_out: [number, number] | null;
  spark: (number | null)[];
  lag: number | null;
  tokens_per_s: number | null;
  generated_per_s: number | null;
  step_s: number | null;
  mfu: number | null;
  served: number | null;
  drops: Record<string, number>;
  faults: Record<string, number>;
  events: number;
  known: number;
  alpha: number | null;
  family: string;
  seed: number | null;
  health: [string, string];
  has_samples: boolean;
  has_pictures: boolean;
}

export interface Chart {
  title: string;
  curves: [string, string][];
  note: string;
  kind: "line" | "reward" | "lag" | "bars";
  from_zero: boolean;
}

export interface Point {
  step: number;
  time: number;
  rewind: boolean;
  held_out: boolean;
  values: Record<string, number>;
}

export interface Curves {
  step: number[];
  time: number[];
  joined: number;
  series: Record<string, (number | null)[]>;
  held_out: Point[];
  resumed: [number, number][];
}

export interface Wait {
  on: string;
  what: string;
  seconds: number;
}

export interface Stage {
  role: string;
  state: string;
  seconds: number;
  queue: number;
  waits: Wait[];
}

export interface Status {
  phase: string;
  finished?: boolean | null;
  condition: string;
  trained: number;
  served: number;
  level: string;
  stages: Stage[];
  engines: { name: string; health: string; version: number; requests: number }[];
  quiet_s: number;
  culprits: string[];
  usage: Record<string, number>;
  time_s: number;
  host: string;
  process: number;
}

export interface Lane {
  kind: "state" | "engine" | "pool" | "gpu" | "groups" | "drops";
  name: string;
  peak?: number;
  shares?: Record<string, number[]>;
  spans?: number[];
  mean?: (number | null)[];
  busy?: number[];
  points?: number[];
  reasons?: Record<string, number[]>;
}

export interface Timeline {
  from: number;
  to: number;
  start: number;
  end: number;
  exact: boolean;
  states: string[];
  lanes: Lane[];
  steps: [number, number, number][];
  steps_in_sight: number;
  versions: [number, number, number][];
  markers: [number, string, string, string][];
}

export interface Flow {
  time: number[];
  in_flight: number[];
  ready: number[];
  versions: [number, number, number][];
}

export interface SampleRow {
  id: string;
  kind: string;
  step: number;
  task: number | null;
  group: number | null;
  lag: number | null;
  length: number | null;
  reward: number | null;
  dropped: string | null;
  prompt: string;
  answer: string;
}

export interface Turn {
  observation: string;
  text?: string;
  tokens?: string[];
  logps?: number[];
  versions?: [number, number][];
  reward?: number;
  left_out?: number;
}

export interface Member {
  sample: string;
  reward: number | null;
  parts?: Record<string, number>;
  advantage?: number;
  lag?: number;
  finish?: string;
  length?: number;
  turns: Turn[];
}

export interface Group {
  title: string;
  chosen?: number;
  prompt?: string;
  expected?: unknown;
  step?: number;
  dropped?: string | null;
  columns: Member[];
  left_out?: number;
}

export interface News {
  heads?: Head[];
  runs?: Record<string, { head: Head; status: Status | null; reading: boolean; points?: Point[]; reload?: boolean }>;
}

export async function ask<T>(path: string, query: Record<string, string | number | null | undefined> = {}): Promise<T> {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query))
    if (value !== null && value !== undefined && value !== "") words.set(name, String(value));
  const response = await fetch(`/api/${path}?${words}`);
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return (await response.json()) as T;
}

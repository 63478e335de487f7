// Saves what a chart shows: its numbers as CSV, or its picture with title and legend as PNG.

import type { Plot } from "./charts";

function save(name: string, ending: string, blob: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${name.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// Makes a table: one row for each place on the x axis, one column for each line, with its band where it has one.
export function makeCsv(plot: Plot): string {
  const columns = plot.lines.flatMap((line) => [
    { name: line.label, x: line.x, y: line.y },
    ...(line.low && line.high ? [{ name: `${line.label} (min)`, x: line.x, y: line.low }, { name: `${line.label} (max)`, x: line.x, y: line.high }] : []),
  ]);
  const places = [...new Set(columns.flatMap((column) => column.x))].sort((one, other) => one - other);
  const tables = columns.map((column) => new Map(column.x.map((x, place) => [x, column.y[place]])));
  const rows = places.map((x) => [x, ...tables.map((table) => table.get(x) ?? "")].join(","));
  return `${[[plot.axis, ...columns.map((column) => column.name)].map(quote).join(","), ...rows].join("\n")}\n`;
}

function quote(text: string): string {
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function saveCsv(plot: Plot): void {
  save(plot.title, "csv", new Blob([makeCsv(plot)], { type: "text/csv" }));
}

export function savePng(plot: Plot, chart: HTMLCanvasElement): void {
  const ratio = window.devicePixelRatio || 1;
  const style = getComputedStyle(document.documentElement);
  const read = (name: string) => style.getPropertyValue(name).trim();
  const canvas = document.createElement("canvas");
  const above = 48 * ratio;
  const room = 12 * ratio;
  canvas.width = chart.width + 2 * room;
  canvas.height = chart.height + above + room;
  const context = canvas.getContext("2d");
  if (!context) return;
  context.fillStyle = read("--surface");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.textBaseline = "middle";
  context.fillStyle = read("--ink");
  context.font = `600 ${13 * ratio}px ${read("--font")}`;
  context.fillText(plot.title, room, 16 * ratio);
  context.font = `${11 * ratio}px ${read("--font")}`;
  let x = room;
  for (const line of plot.lines) {
    context.fillStyle = line.color;
    context.fillRect(x, 33 * ratio, 14 * ratio, 4 * ratio);
    context.fillStyle = read("--muted");
    context.fillText(line.label, x + 19 * ratio, 35 * ratio);
    x += context.measureText(line.label).width + 33 * ratio;
  }
  context.drawImage(chart, room, above);
  canvas.toBlob((blob) => { if (blob) save(plot.title, "png", blob); });
}

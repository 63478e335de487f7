// Bundles the page into the Python package, with the hash of the sources beside it. Run by `make frontend`.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync, copyFileSync } from "node:fs";
import { build } from "esbuild";

const target = "../src/headway/dashboard/static";
const sources = ["package.json", ...readdirSync("src").sort().map((name) => `src/${name}`)];
const hash = createHash("sha256");
for (const name of sources) hash.update(`${name}\0`).update(readFileSync(name)).update("\0");
const options = { bundle: true, minify: true, target: "es2022", legalComments: "inline", logLevel: "warning" };
await build({ ...options, entryPoints: ["src/app.ts"], outfile: `${target}/app.js`, format: "iife" });
await build({ ...options, entryPoints: ["src/app.css"], outfile: `${target}/app.css` });
for (const name of ["index.html", "icon.svg"]) copyFileSync(`src/${name}`, `${target}/${name}`);
writeFileSync(`${target}/sources.sha256`, `${hash.digest("hex")}\n`);

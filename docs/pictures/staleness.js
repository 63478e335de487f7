// Draws the run that the slider selects: training steps as bars, requests under way as an area.
(async function () {
  const here = document.currentScript || document.querySelector('script[src$="staleness.js"]');
  const runs = await (await fetch(new URL("staleness.json", here.src))).json();
  const slider = document.getElementById("alpha"), figure = document.getElementById("staleness-figure");
  const longest = Math.max(...runs.map(run => run.end_s)), most = Math.max(...runs.flatMap(run => run.running));
  const make = (name, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text) element.textContent = text;
    figure.append(element);
    return element;
  };
  function draw() {
    const run = runs[Number(slider.value)], x = time => 70 + 720 * time / longest, y = count => 195 - 100 * count / most;
    document.getElementById("alpha-value").textContent = run.alpha;
    figure.replaceChildren();
    make("text", { x: 0, y: 45, "font-size": 12, fill: "currentColor" }, "trainer");
    make("text", { x: 0, y: 150, "font-size": 12, fill: "currentColor" }, "engines");
    make("rect", { x: 70, y: 20, width: 720 * run.end_s / longest, height: 40, fill: "currentColor", opacity: 0.08 });
    run.steps.forEach(([begin, end, lag], number) => {
      const bar = make("rect", { x: x(begin), y: 20, width: Math.max(1, x(end) - x(begin)), height: 40, fill: "#00695c" });
      bar.append(Object.assign(document.createElementNS("http://www.w3.org/2000/svg", "title"),
        { textContent: `step ${number + 1}: ${(end - begin).toFixed(0)} s, mean lag ${lag}` }));
      make("text", { x: (x(begin) + x(end)) / 2, y: 45, "font-size": 11, fill: "#fff", "text-anchor": "middle" }, lag.toFixed(1));
    });
    const width = run.end_s / run.running.length;
    const points = run.running.map((count, place) => `${x(place * width)},${y(count)} ${x((place + 1) * width)},${y(count)}`);
    make("polygon", { points: `${x(0)},195 ${points.join(" ")} ${x(run.end_s)},195`, fill: "#ef6c00", opacity: 0.75 });
    make("line", { x1: 70, x2: 790, y1: 195, y2: 195, stroke: "currentColor", opacity: 0.4 });
    const lag = run.steps.reduce((sum, step) => sum + step[2], 0) / run.steps.length;
    document.getElementById("staleness-words").textContent =
      `${run.step_s} s a step, ${(100 * (1 - run.step_s / runs[0].step_s)).toFixed(0)} % less than with α = 0; mean lag ${lag.toFixed(2)}.`;
  }
  slider.addEventListener("input", draw);
  draw();
})();

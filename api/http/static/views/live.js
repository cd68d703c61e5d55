// The server's last minutes, polled while the page can be seen; only the page remembers them.

import { getStats } from "../lib/api.js";
import { TimeChart } from "./charts.js";
import { byId, h } from "../lib/dom.js";
import { count, decibel, fixed, milliseconds, percent } from "../lib/format.js";

const EVERY_MS = 2000;
const SLOWEST_MS = 20000; // between tries while the server does not answer
const SPAN_S = 300;
const MOST_BARS = 30;

export class Live {
  constructor() {
    this.history = []; // {at_s, rate, p50, p95}, oldest first
    this.pause_ms = EVERY_MS;
    const format = (value) => String(value);
    this.rate = new TimeChart(byId("rate-chart"), {
      series: [{ colour: "--accent", fill: "--accent-soft" }],
      span_s: SPAN_S,
      format,
      onPoint: (index) => this.#readRate(index),
    });
    this.latency = new TimeChart(byId("latency-chart"), {
      series: [{ colour: "--accent" }, { colour: "--air", dash: [5, 4] }],
      span_s: SPAN_S,
      format,
      onPoint: (index) => this.#readLatency(index),
    });
    document.addEventListener("visibilitychange", () => this.refresh());
    this.refresh();
  }

  /** Poll now, then go on at the usual pace. */
  async refresh() {
    clearTimeout(this.timer);
    this.request?.abort();
    if (document.hidden) return;
    const request = (this.request = new AbortController());
    try {
      this.#show(await getStats(request.signal));
      this.pause_ms = EVERY_MS;
      byId("live").dataset.state = "live";
      byId("live-state").textContent = "live";
    } catch (error) {
      if (error.name === "AbortError") return; // a newer call has taken over
      this.pause_ms = Math.min(SLOWEST_MS, 2 * this.pause_ms);
      byId("live").dataset.state = "lost";
      byId("live-state").textContent = error.status === 401 ? "needs a key" : "no connection";
    }
    this.timer = setTimeout(() => this.refresh(), this.pause_ms);
  }

  #show(stats) {
    const now_s = performance.now() / 1000;
    this.history.push({
      at_s: now_s,
      rate: stats.requests_per_second,
      p50: stats.latency_ms?.p50,
      p95: stats.latency_ms?.p95,
    });
    while (this.history[0].at_s < now_s - SPAN_S) this.history.shift();
    const column = (name) => this.history.map((point) => point[name] ?? null);
    const times_s = this.history.map((point) => point.at_s - now_s);
    this.rate.update(times_s, column("rate"));
    this.latency.update(times_s, column("p50"), column("p95"));
    this.#readRate(null);
    this.#readLatency(null);
    this.#showTiles(stats);
    showLoad(stats);
  }

  #point(index) {
    return (index === null ? this.history.at(-1) : this.history[index]) ?? {};
  }

  #readRate(index) {
    byId("rate-now").textContent = fixed(this.#point(index).rate, 1);
  }

  #readLatency(index) {
    const { p50, p95 } = this.#point(index);
    byId("p50-now").textContent = milliseconds(p50);
    byId("p95-now").textContent = milliseconds(p95);
  }

  #showTiles(stats) {
    const tiles = [
      ["Images in window", `${count(stats.images)}`, `of the last ${count(stats.window)}`],
      ["Balancedness", fixed(stats.balancedness, 2), "1 is even"],
      ["Degraded", percent(stats.degraded_share), "of answers"],
      ["NMSE", decibel(stats.nmse_db), "mean over the window"],
      ["Queue", count(stats.queue_depth), `${count(stats.in_progress)} in progress`],
    ];
    byId("live-tiles").replaceChildren(
      ...tiles.map(([name, value, note]) =>
        h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, h("small", {}, note))),
      ),
    );
  }
}

function showLoad({ experts = [], images }) {
  const trouble = experts.filter((expert) => expert.state !== "up");
  const most = Math.max(1.5, ...experts.map((expert) => expert.load_ratio ?? 0));
  const busiest = [...experts].sort((a, b) => (b.load_ratio ?? 0) - (a.load_ratio ?? 0)).slice(0, MOST_BARS);
  const shown = experts.length <= MOST_BARS ? experts : busiest;
  byId("load-note").textContent =
    experts.length > MOST_BARS
      ? `busiest ${MOST_BARS} of ${experts.length}`
      : images
        ? "1 is the fair share"
        : "no requests yet";
  const bars = byId("load-bars");
  bars.style.setProperty("--fair", String(1 / most));
  bars.replaceChildren(...shown.map((expert) => loadBar(expert, most)));
  byId("expert-states").replaceChildren(
    ...(trouble.length
      ? [
          ...trouble.slice(0, 8).map(({ id, state }) => h("li", { class: `state-${state}` }, `expert ${id} ${state}`)),
          ...(trouble.length > 8 ? [h("li", {}, `and ${trouble.length - 8} more`)] : []),
        ]
      : [h("li", { class: "state-up" }, experts.length ? `all ${experts.length} experts up` : "no experts yet")]),
  );
}

function loadBar({ id, load_ratio, selected, state }, most) {
  const load = load_ratio ?? 0;
  const words = `expert ${id}: ${fixed(load_ratio, 2)} of the fair share, ${count(selected)} images, ${state}`;
  return h(
    "li",
    { class: `state-${state}`, title: words, vars: { "--value": load / most } },
    h("span", { class: "sr-only" }, words),
    h("i", { "aria-hidden": "true" }),
    h("span", { class: "bar-id", "aria-hidden": "true" }, String(id)),
  );
}

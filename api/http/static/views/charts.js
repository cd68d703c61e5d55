// Small time charts with uPlot. Colours come from the style sheet, so charts are rebuilt when the theme changes.

import uPlot from "../vendor/uplot/uPlot.esm.js";

const HEIGHT = 132;
const SHORTEST_S = 60; // a chart of five minutes looks broken in the first one

/** A chart of the last `span_s` seconds. `series`: [{colour: "--accent", dash?, fill?}], `onPoint(index | null)`. */
export class TimeChart {
  constructor(root, { series, span_s, onPoint, format }) {
    Object.assign(this, { root, series, span_s, onPoint, format });
    this.data = [[], ...series.map(() => [])];
    this.#build();
    new ResizeObserver(() => this.#resize()).observe(root);
    addEventListener("themechange", () => this.#build());
  }

  /** `times_s` are seconds relative to now, so zero or less. */
  update(times_s, ...values) {
    this.data = [times_s, ...values];
    this.plot.setData(this.data);
  }

  #build() {
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      stroke: colour("--ink-2"),
      font: `11px ${getComputedStyle(document.body).fontFamily}`,
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
    };
    this.plot = new uPlot(
      {
        width: this.root.clientWidth || 300,
        height: HEIGHT,
        padding: [8, 20, 0, 0],
        legend: { show: false }, // the heading above the chart shows the values
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
        scales: {
          x: { time: false, range: () => [-this.#span(), 0] },
          y: { range: (_, __, max) => [0, niceCeiling(max)] },
        },
        axes: [
          {
            ...axis,
            size: 24,
            gap: 4,
            space: 60,
            grid: { show: false },
            incrs: [15, 30, 60, 120],
            values: (_, ticks) => ticks.map(ago),
          },
          { ...axis, size: 40, gap: 6, space: 36, values: (_, ticks) => ticks.map(this.format) },
        ],
        series: [
          {},
          ...this.series.map((line) => ({
            stroke: colour(line.colour),
            width: 1.75,
            dash: line.dash,
            fill: line.fill ? colour(line.fill) : undefined,
            points: { show: false },
          })),
        ],
        hooks: { setCursor: [(plot) => this.onPoint(plot.cursor.idx ?? null)] },
      },
      this.data,
      this.root,
    );
  }

  /** Seconds on the axis: whole minutes, as many as there are data for. */
  #span() {
    const oldest_s = -(this.data[0][0] ?? 0);
    return Math.min(this.span_s, Math.max(SHORTEST_S, Math.ceil(oldest_s / 60) * 60));
  }

  #resize() {
    if (this.root.clientWidth) this.plot.setSize({ width: this.root.clientWidth, height: HEIGHT });
  }
}

function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 1.05) ?? 20 * power;
}

function ago(seconds) {
  if (seconds === 0) return "now";
  return seconds % 60 ? `\u2212${-seconds}\u202fs` : `\u2212${-seconds / 60}\u202fmin`;
}

// Facts of one answer: channel, communication and timings.

import { byId, h } from "../lib/dom.js";
import { MISSING, bits, count, milliseconds, percent, ratioInDecibel, scientific, times } from "../lib/format.js";

// In the order things happen, each with the place it happens at; the flow in the header uses the same places.
const STAGES = [
  ["queue", "cloud"],
  ["decode", "cloud"],
  ["backbone", "cloud"],
  ["read", "clients"],
  ["route", "cloud-2"],
  ["expert", "clients"],
  ["channel", "air"],
  ["encode", "cloud"],
];

export function showFacts(answer, changedShare) {
  byId("facts-empty").hidden = true;
  byId("facts-body").hidden = false;
  showChannel(answer.channel, answer.routing, changedShare);
  showCommunication(answer.communication ?? {});
  showTimings(answer.timings_ms ?? {});
}

function showChannel(channel, routing, changedShare) {
  const spoke = routing.experts.filter((expert) => expert.weight > 0).length;
  const rows = [
    ["NMSE", ratioInDecibel(channel.nmse), "Distortion of the received sum against the noiseless one", "nmse"],
    ["Scaling \u03c1", scientific(channel.rho), "Common receive scale, set by the weakest transmitting client", "rho"],
    [
      "Noise power",
      channel.kind === "ideal" ? "none" : scientific(channel.noise_power),
      "Per complex symbol",
      "noise-power",
    ],
    ["Transmitting", spoke ? `${spoke} at once` : "nobody", "Routed clients that are not in deep fade", "transmitting"],
    [
      "Pixels changed",
      changedShare === null ? MISSING : percent(changedShare),
      "Against the mask before this one",
      "changed",
    ],
    ["Seed", String(channel.seed ?? MISSING), "Fading and noise follow from it", "seed"],
  ];
  if (channel.kind === "digital" && spoke) rows[3][1] = `${spoke} in turn`;
  byId("channel-facts").replaceChildren(
    ...rows.map(([name, value, meaning, id]) =>
      h("div", { class: "fact", title: meaning }, h("dt", {}, name), h("dd", { "data-testid": `fact-${id}` }, value)),
    ),
  );
}

function showCommunication(ledger) {
  byId("communication").replaceChildren(
    comparison({
      title: "Routing uplink",
      ours: ["statistics", ledger.uplink_routing_bits, bits],
      theirs: ["raw features", ledger.uplink_raw_feature_bits, bits],
      id: "uplink",
    }),
    comparison({
      title: "Air time",
      ours: ["all at once", ledger.air_channel_uses, uses],
      theirs: ["one after another", ledger.tdma_channel_uses, uses],
      id: "air-time",
    }),
  );
}

const uses = (value) => `${count(value)} uses`;

/** Two bars on one linear scale: a bar too short to see is the message. */
function comparison({ title, ours, theirs, id }) {
  const known = theirs[1] !== null && theirs[1] !== undefined;
  const largest = Math.max(ours[1] ?? 0, theirs[1] ?? 0, 1);
  const more = known && theirs[1] < ours[1]; // possible: at high SNR and K = 1, turns can be cheaper
  const verdict = more
    ? h("strong", {}, `${times(ours[1], theirs[1])}\u00d7 more`)
    : h("strong", {}, `${times(theirs[1], ours[1])}\u00d7 less`);
  const bar = ([name, value, format], kind) =>
    h(
      "div",
      { class: `versus ${kind}`, vars: { "--value": (value ?? 0) / largest } },
      h("span", {}, name),
      h("span", { class: "track", "aria-hidden": "true" }, h("i")),
      h("span", { class: "value" }, format(value)),
    );
  return h(
    "div",
    { class: "comparison", "data-testid": `compare-${id}` },
    h("p", {}, `${title}: `, !ours[1] ? h("strong", {}, "none") : known ? verdict : h("strong", {}, ours[2](ours[1])), known && ours[1] ? ` than ${theirs[0]}` : ""),
    bar(ours, "ours"),
    known ? bar(theirs, "theirs") : null,
  );
}

function showTimings(timings) {
  const known = STAGES.filter(([name]) => timings[name] > 0).map(([name, place]) => [name, place, timings[name]]);
  const listed = new Set([...STAGES.map(([name]) => name), "total"]);
  for (const [name, value] of Object.entries(timings))
    if (!listed.has(name) && value > 0) known.push([name, "other", value]);
  const sum = known.reduce((total, [, , value]) => total + value, 0);
  const total = Math.max(timings.total ?? 0, sum);
  // Between the stages: waiting for a batch, messages between actors.
  if (total - sum > 0.005 * total) known.push(["between", "other", total - sum]);
  byId("timings-total").textContent = milliseconds(timings.total ?? sum);
  byId("timings-bar").replaceChildren(
    ...known.map(([name, place, value]) =>
      h("i", { class: `at-${place}`, title: `${name} ${milliseconds(value)}`, vars: { "--value": value / total } }),
    ),
  );
  byId("timings-list").replaceChildren(
    ...known.map(([name, place, value]) =>
      h(
        "li",
        {},
        h("i", { class: `at-${place}` }),
        h("span", {}, name),
        h("span", { class: "value" }, milliseconds(value)),
      ),
    ),
  );
}

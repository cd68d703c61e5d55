// The notice at the top: errors, degraded answers, and what the user can do about them.

import { setApiKey } from "../lib/api.js";
import { byId, h } from "../lib/dom.js";

let countdown = null;
let dismissed = null; // a warning the user has read; a moving slider must not bring it back with every answer

export function clearNotice() {
  clearInterval(countdown);
  const box = byId("notice");
  box.hidden = true;
  box.replaceChildren();
}

export function showNotice(kind, title, detail = "", ...actions) {
  const box = byId("notice");
  const text = `${title} ${detail}`;
  if (kind === "warning" && (text === dismissed || (!box.hidden && box.dataset.text === text))) return;
  clearNotice();
  box.dataset.text = text;
  // An error interrupts a screen reader, anything else waits for a pause.
  box.setAttribute("role", kind === "error" ? "alert" : "status");
  box.dataset.kind = kind;
  box.hidden = false;
  box.append(
    h("div", { class: "notice-text" }, h("strong", {}, title), detail ? h("span", {}, detail) : null),
    ...actions,
    h("button", { type: "button", class: "icon-button", "aria-label": "Dismiss", onclick: dismiss }, "\u00d7"),
  );
}

function dismiss() {
  dismissed = byId("notice").dataset.text;
  clearNotice();
}

/** Show a failed request; `retry` runs it again. */
export function showError(error, retry) {
  if (error.status === 401) {
    showNotice("error", sentence(error.message), "This server wants an API key.", keyForm(retry));
    return;
  }
  const busy = error.status === 429 || error.status === 503;
  const again = retry
    ? h("button", { type: "button", class: "button", onclick: () => (clearNotice(), retry()) }, "Try again")
    : null;
  const detail = error.detail && error.detail !== error.message ? sentence(error.detail) : "";
  showNotice("error", sentence(error.message), detail, ...(again ? [again] : []));
  if (busy && again) startCountdown(again, error.retryAfter_s ?? 1);
}

/** Count down on the button; it works before that too, and the server may then refuse again. */
function startCountdown(button, seconds) {
  let left = Math.max(1, Math.ceil(seconds));
  byId("notice")
    .querySelector(".notice-text")
    .append(h("span", {}, `The server asks to wait ${left}\u202fs.`));
  const tick = () => {
    button.textContent = left > 0 ? `Try again in ${left}\u202fs` : "Try again";
    if (left-- <= 0) clearInterval(countdown);
  };
  tick();
  countdown = setInterval(tick, 1000);
}

function keyForm(retry) {
  const field = h("input", {
    type: "password",
    id: "api-key",
    autocomplete: "off",
    required: true,
    spellcheck: "false",
  });
  const submit = (event) => {
    event.preventDefault();
    setApiKey(field.value.trim());
    clearNotice();
    retry?.();
  };
  return h(
    "form",
    { class: "key-form", onsubmit: submit },
    h("label", { for: "api-key" }, "API key"),
    field,
    h("button", { type: "submit", class: "button primary" }, "Use key"),
  );
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

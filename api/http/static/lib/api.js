// Requests to the server, and its errors.

const KEY = "airmoe-api-key";

export class ApiError extends Error {
  constructor(status, message, { detail = "", retryAfter_s = null } = {}) {
    super(message);
    this.status = status;
    this.detail = detail;
    this.retryAfter_s = retryAfter_s;
  }
}

// Storage can be forbidden; the key then lives as long as the page.
let keyOfThisPage = null;

export function setApiKey(key) {
  keyOfThisPage = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // kept above
  }
}

function apiKey() {
  try {
    return keyOfThisPage ?? sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

async function send(path, { headers = {}, ...options } = {}) {
  const key = apiKey();
  let response;
  try {
    response = await fetch(path, { ...options, headers: key ? { ...headers, "X-API-Key": key } : headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached", { detail: "Is it still running?" });
  }
  if (!response.ok) throw await toError(response);
  return response;
}

async function toError(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // a proxy may answer in HTML; the status is all there is then
  }
  const seconds = Number(response.headers.get("Retry-After"));
  return new ApiError(response.status, body?.error ?? `The server answered ${response.status}`, {
    detail: readable(body?.detail),
    retryAfter_s: response.headers.has("Retry-After") && Number.isFinite(seconds) ? seconds : null,
  });
}

/** `detail` in words: a string, FastAPI's list of {loc, msg}, or any other object. */
function readable(detail) {
  if (detail === null || detail === undefined) return "";
  if (Array.isArray(detail)) return detail.map(readable).join("; ");
  if (typeof detail !== "object") return String(detail);
  if ("msg" in detail) return `${(detail.loc ?? []).slice(1).join(".")} ${detail.msg}`.trim();
  return Object.entries(detail)
    .map(([name, value]) => `${name}: ${readable(value)}`)
    .join(", ");
}

const json = async (path, options) =>
  (await send(path, { headers: { Accept: "application/json" }, ...options })).json();

export const getConfig = () => json("/config");
export const getExperts = async () => (await json("/experts")).experts;
export const getSamples = async () => (await json("/samples")).samples;
export const getStats = (signal) => json("/routing/stats", { signal });

/** Samples are fetched, not put into <img src>: only a fetch can carry the API key. */
export const getBlob = async (path) => (await send(path)).blob();

/** `choice` is {only: who} or {without: who}, or null for everybody's answer. */
export function segment(image, { topK, snrDb, channel, seed }, choice, signal) {
  const query = new URLSearchParams({ top_k: topK, snr_db: snrDb, channel, seed, ...choice });
  return json(`/segment?${query}`, {
    method: "POST",
    body: image.blob,
    headers: { Accept: "application/json", "Content-Type": image.type },
    signal,
  });
}

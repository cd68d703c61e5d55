// Numbers as people read them. A missing number is an en dash, never "NaN" or "null".

export const MISSING = "\u2013";
const THIN = "\u202f"; // narrow no-break space, between thousands and before units

const SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en").replaceAll(",", THIN) : MISSING;
}

/** Fixed decimals with a real minus sign. */
export function fixed(value, digits = 2) {
  return isNumber(value) ? value.toFixed(digits).replace("-", "\u2212") : MISSING;
}

/** Three significant digits, in powers of ten where the plain form would be long. */
export function scientific(value) {
  if (!isNumber(value)) return MISSING;
  if (value === 0) return "0";
  const exponent = Math.floor(Math.log10(Math.abs(value)));
  if (exponent >= -2 && exponent < 4) return String(Number(value.toPrecision(3))).replace("-", "\u2212");
  const superscript = [...String(exponent)].map((digit) => SUPERSCRIPTS[digit] ?? "\u207b");
  return `${fixed(value / 10 ** exponent, 2)}${THIN}\u00d7${THIN}10${superscript.join("")}`;
}

export function percent(share, digits = 1) {
  if (!isNumber(share)) return MISSING;
  const value = 100 * share;
  return value > 0 && value < 10 ** -digits ? `<${THIN}${10 ** -digits}${THIN}%` : `${value.toFixed(digits)}${THIN}%`;
}

export function decibel(value, digits = 1) {
  return isNumber(value) ? `${fixed(value, digits)}${THIN}dB` : MISSING;
}

/** A power ratio in dB; zero distortion is the ideal channel, which no number of dB names. */
export function ratioInDecibel(ratio) {
  if (!isNumber(ratio)) return MISSING;
  return ratio > 0 ? decibel(10 * Math.log10(ratio)) : "none";
}

export function milliseconds(value) {
  if (!isNumber(value)) return MISSING;
  if (value >= 1000) return `${(value / 1000).toFixed(1)}${THIN}s`;
  return `${value.toFixed(value < 10 ? 1 : 0)}${THIN}ms`;
}

export function bits(value) {
  if (!isNumber(value)) return MISSING;
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)}${THIN}Gbit`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}${THIN}Mbit`;
  if (value >= 1e5) return `${(value / 1e3).toFixed(0)}${THIN}kbit`;
  return `${count(value)}${THIN}bit`;
}

export function bytes(value) {
  return value >= 1e6 ? `${(value / 1e6).toFixed(1)}${THIN}MB` : `${Math.ceil(value / 1e3)}${THIN}kB`;
}

/** "1 150" or "3.3": how many times `more` is of `less`. */
export function times(more, less) {
  if (!isNumber(more) || !isNumber(less) || less <= 0) return MISSING;
  const ratio = more / less;
  if (ratio < 20) return ratio.toFixed(1);
  return count(Number(ratio.toPrecision(3)));
}

export const plain = (name) => name.replaceAll("_", " ");

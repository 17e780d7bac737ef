// Runs before the page shows, so that a chosen theme does not flash. Light, dark, or what the system says.
"use strict";
document.documentElement.classList.add("js");
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is switched off: the system decides */ }

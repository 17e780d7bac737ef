// Parts of pages that renew themselves (hx-trigger="every …"), in the App and in the admin.
"use strict";

// What renews itself keeps still under a pressed button or finger, whose click would be lost, and under selected text;
// it comes again soon.
let isPressed = false;
document.addEventListener("pointerdown", (event) => {
  // The menu of the second button keeps the end of its press for itself.
  if (event.button !== 2) isPressed = true;
}, true);
document.addEventListener("pointermove", (event) => {
  // Released where no event told of it: in another window, say.
  if (!event.buttons) isPressed = false;
}, true);
for (const end of ["pointerup", "pointercancel"]) {
  // The click comes after it.
  document.addEventListener(end, () => setTimeout(() => { isPressed = false; }), true);
}

function isHeld(element) {
  const selection = document.getSelection();
  return isPressed || (!selection.isCollapsed && selection.containsNode(element, true));
}

document.addEventListener("htmx:beforeSwap", (event) => {
  const trigger = event.detail.target.getAttribute("hx-trigger") ?? "";
  if (trigger.startsWith("every") && isHeld(event.detail.target)) event.detail.shouldSwap = false;
});

// A job's page is loaded anew when the job has ended: not under a press either.
document.addEventListener("htmx:beforeOnLoad", (event) => {
  if (isPressed && event.detail.xhr.getResponseHeader("HX-Refresh")) event.preventDefault();
});

// A part that was asked for after the session had ended is the sign-in page: show it as a page, not inside this one.
document.addEventListener("htmx:beforeSwap", (event) => {
  const url = event.detail.xhr.responseURL;
  if (url && new URL(url).pathname === "/app/sign-in") {
    event.detail.shouldSwap = false;
    location.reload();
  }
});

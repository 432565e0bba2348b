"""A real browser that opens pages from disk, and tells of everything that it was asked for."""

import contextlib
import json
import os
import shutil

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
_ARGUMENTS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
# What a page may load besides itself: images that it holds.
_INSIDE = ("data:", "blob:", "about:", "devtools:", "chrome:")


class Browser:
    """Opens one page after another.

    Args:
        driver: Selenium's driver of Chromium.
    """

    def __init__(self, driver):
        self.driver = driver

    def open(self, path, *, dark=False, width=1280, height=1000):
        """Opens a file in a window of that size, with a clean record."""
        self._tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.emulate(dark=dark)
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(path.as_uri())

    def run(self, script, *args):
        """Returns what a script in the page returns."""
        return self.driver.execute_script(script, *args)

    def wait_for(self, script):
        """Waits until a script in the page returns something true, and returns that."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, 30).until(lambda driver: driver.execute_script(script))

    def find(self, selector):
        """Returns the element."""
        from selenium.webdriver.common.by import By

        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def complaints(self):
        """Returns what the console says."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self):
        """Returns every address outside of the page that was asked for since it was opened."""
        messages = [
            json.loads(each["message"])["message"] for each in self.driver.get_log("performance")
        ]
        sent = [
            each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"
        ]
        urls = [each["request"]["url"] for each in sent]
        return [url for url in urls if not url.startswith(_INSIDE)]

    def screenshot(self, path):
        """Writes a picture of the whole page."""
        self.wait_for("return document.fonts.status === 'loaded'")
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return window.innerWidth")
        self._tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.driver.save_screenshot(str(path))

    def emulate(self, *, dark):
        """Makes the system's appearance dark or light."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._tell("Emulation.setEmulatedMedia", features=features)

    def _tell(self, command, **values):
        self.driver.execute_cdp_cmd(command, values)


@contextlib.contextmanager
def browsing():
    """Starts a browser that ends with the block."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    # Its sandbox does not run as root.
    for argument in (*_ARGUMENTS, *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(DRIVER, log_output=os.devnull)
    driver = webdriver.Chrome(options, service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()

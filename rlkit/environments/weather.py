"""Tell the weather of three cities, as an example of a tool with the required types and
docstring."""

from __future__ import annotations

from typing import Literal

# city → °C and sky; the weather never changes
WEATHER = {"Paris": (18, "light rain"), "London": (15, "cloudy"), "Tokyo": (24, "sunny")}


def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Tells the weather in a city.

    Args:
        city: The name of the city.
        unit: The unit of the temperature.
    """
    # The policy reads the docstring above. Every ValueError holds a sentence for the policy.
    known = {name.casefold(): name for name in WEATHER}
    name = known.get(city.strip().casefold())
    if name is None:
        raise ValueError(f"no weather is known for {city!r}; there is {', '.join(WEATHER)}")
    degrees, sky = WEATHER[name]
    return (
        f"{name}: {degrees} °C, {sky}"
        if unit == "celsius"
        else f"{name}: {degrees * 9 / 5 + 32:g} °F, {sky}"
    )


get_weather.bounded = True  # type: ignore[attr-defined]  # it only reads a table

// Package config reads a transfer config: strictly, and with messages that say where a mistake is. What the keys mean
// stands with the types that they fill, in package host.
package config

import "errors"

// Err is wrapped by every error that a changed config, binary or flag could cure: it is host.ErrConfig.
var Err = errors.New("config")

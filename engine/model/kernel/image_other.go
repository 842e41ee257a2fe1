//go:build !linux

package kernel

import "errors"

// mapImage does nothing here: images are used on Linux only.
func mapImage(string, int) ([]byte, func([]byte) error, error) {
	return nil, nil, errors.ErrUnsupported
}

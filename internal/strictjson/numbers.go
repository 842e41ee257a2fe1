// Package strictjson reads JSON configs strictly: what a config says that no reader knows is an error that names it.
package strictjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"strings"
)

// maxNumber bounds the text of a number in a config, so that none is rounded by numberBits.
const (
	maxNumber  = 64
	numberBits = 512
)

// errNotWhole says what a whole number in a config may look like.
var errNotWhole = errors.New(`is no whole number`)

// ConfigNumber is the text of a JSON number that raw is, or that raw is a string of: people write ports and
// sizes as "14579" and "1e9". It is false for everything else.
func ConfigNumber(raw []byte) (text string, ok bool) {
	raw = bytes.TrimSpace(raw)
	if len(raw) > 0 && raw[0] == '"' {
		if json.Unmarshal(raw, &text) != nil {
			return "", false
		}
	} else {
		text = string(raw)
	}
	text = strings.TrimSpace(text)
	isNumber := text != "" && strings.ContainsRune("-0123456789", rune(text[0])) && json.Valid([]byte(text))
	return text, isNumber && len(text) <= maxNumber
}

// ConfigWhole reads a whole number of a config: 10, 1e1, "10" or "1e1"; a number of bytes may have a unit, as in
// "10GB" or "10GiB". Nothing is rounded: what is not whole, or more than an int64 holds, is an error.
func ConfigWhole(raw []byte, inBytes bool) (int64, error) {
	text, ok := ConfigNumber(raw)
	unit := int64(1)
	if !ok && inBytes && json.Unmarshal(raw, &text) == nil {
		text, unit = cutUnit(strings.TrimSpace(text))
		text, ok = ConfigNumber([]byte(text))
	}
	if !ok {
		if inBytes {
			return 0, fmt.Errorf(`%w and no size such as "10GiB"`, errNotWhole)
		}
		return 0, errNotWhole
	}
	f, _, err := big.ParseFloat(text, 10, numberBits, big.ToNearestEven)
	if err != nil {
		return 0, errNotWhole
	}
	n, exact := f.Mul(f, new(big.Float).SetInt64(unit)).Int64()
	if exact != big.Exact {
		if f.IsInt() {
			return 0, errors.New("is too large")
		}
		return 0, errNotWhole
	}
	return n, nil
}

// cutUnit takes the unit of a size off its text. KB and so on are powers of 1000, KiB and so on of 1024. An
// unknown unit stays in the text, which then does not parse as a number.
func cutUnit(text string) (number string, unit int64) {
	lower := strings.ToLower(text)
	decimal, binary := int64(1), int64(1)
	for _, letter := range "kmgt" {
		decimal, binary = decimal*1000, binary*1024
		for suffix, size := range map[string]int64{string(letter) + "b": decimal, string(letter) + "ib": binary} {
			if strings.HasSuffix(lower, suffix) {
				return strings.TrimSpace(text[:len(text)-len(suffix)]), size
			}
		}
	}
	return text, 1
}

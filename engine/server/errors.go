package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/kvport/kvport/engine"
)

// Error is an error as OpenAI's clients expect it.
type Error struct {
	Status  int    // of HTTP
	Kind    string // invalid_request_error, rate_limit_error or server_error
	Param   string // the field that is wrong; empty: none in particular
	Code    string
	Message string
}

// Error implements error.
func (e *Error) Error() string { return e.Message }

// MarshalJSON gives the body that OpenAI's clients read.
func (e *Error) MarshalJSON() ([]byte, error) {
	var body struct {
		Error struct {
			Message string  `json:"message"`
			Type    string  `json:"type"`
			Param   *string `json:"param"`
			Code    string  `json:"code"`
		} `json:"error"`
	}
	body.Error.Message, body.Error.Type, body.Error.Code = e.Message, e.Kind, e.Code
	if e.Param != "" {
		body.Error.Param = &e.Param
	}
	return json.Marshal(body)
}

// Write sends the error as the whole answer.
func (e *Error) Write(w http.ResponseWriter) {
	data, err := json.Marshal(e)
	if err != nil {
		data = []byte(`{"error":{"message":"error cannot be encoded","type":"server_error","param":null,"code":"internal"}}`)
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(data)+1))
	if e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable {
		h.Set("Retry-After", "1")
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(append(data, '\n')) // a client that left needs no answer
}

func invalid(param, code, format string, args ...any) *Error {
	return &Error{http.StatusBadRequest, "invalid_request_error", param, code, fmt.Sprintf(format, args...)}
}

// wrongType says that a field holds the wrong kind of JSON value.
func wrongType(param, want string) *Error {
	return invalid(param, "invalid_type", "%s: want %s", param, want)
}

// wrongValue says that a field's value is out of range.
func wrongValue(param, format string, args ...any) *Error {
	return invalid(param, "invalid_value", param+": "+format, args...)
}

// unsupported says that a field asks for what this engine cannot do. Silently leaving it out would
// change the answer.
func unsupported(param, format string, args ...any) *Error {
	return invalid(param, "unsupported_value", param+": "+format, args...)
}

// errDraining refuses new requests at shutdown.
func errDraining() *Error {
	return &Error{http.StatusServiceUnavailable, "server_error", "", "draining", "the server is shutting down"}
}

// asError turns what the engine said into an answer.
func asError(err error) *Error {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, engine.ErrTooLong):
		return invalid("", "context_length_exceeded", "%v", err)
	case errors.Is(err, engine.ErrInvalid):
		return invalid("", "invalid_value", "%v", err)
	case errors.Is(err, engine.ErrOverloaded):
		return &Error{http.StatusTooManyRequests, "rate_limit_error", "", "overloaded", err.Error()}
	case errors.Is(err, engine.ErrClosed):
		return errDraining()
	case errors.Is(err, engine.ErrLoadFailed):
		return &Error{http.StatusInternalServerError, "server_error", "", "kv_load_failed", err.Error()}
	case errors.Is(err, engine.ErrNotReset):
		return &Error{http.StatusNotImplemented, "server_error", "", "reset_not_supported", err.Error()}
	case errors.Is(err, engine.ErrKept):
		return &Error{http.StatusConflict, "invalid_request_error", "", "blocks_kept", err.Error()}
	}
	return &Error{http.StatusInternalServerError, "server_error", "", "internal", err.Error()}
}

package main

import (
	"fmt"
	"io"
	"net"
	"strconv"
	"time"
)

const port = 7

// Reads one stream to its end and answers with the number of bytes.
func listen(listener net.Listener) error {
	fmt.Println("listening")
	stream, err := listener.Accept()
	if err != nil {
		return err
	}
	total, buffer := int64(0), make([]byte, 1<<18)
	for {
		count, err := stream.Read(buffer)
		total += int64(count)
		if err == io.EOF {
			break
		} else if err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintf(stream, "%d", total); err != nil {
		return err
	}
	stream.Close()
	// What was written is delivered by then.
	time.Sleep(500 * time.Millisecond)
	return nil
}

// Writes for some seconds, and prints how fast the peer received it.
func dial(stream net.Conn, seconds string) error {
	duration, err := strconv.ParseFloat(seconds, 64)
	if err != nil {
		return err
	}
	started, data := time.Now(), make([]byte, 1<<18)
	for time.Since(started).Seconds() < duration {
		if _, err := stream.Write(data); err != nil {
			return err
		}
	}
	if err := stream.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		return err
	}
	answer, err := io.ReadAll(stream)
	if err != nil {
		return err
	}
	took := time.Since(started).Seconds()
	total, err := strconv.ParseInt(string(answer), 10, 64)
	if err != nil {
		return err
	}
	fmt.Printf("%d bytes in %.3f s\n", total, took)
	return nil
}

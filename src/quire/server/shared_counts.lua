-- Counts of one tenant in Redis, in sliding windows and by the day. Times are microseconds of Redis's clock.
-- KEYS: for each window a sorted set, of members by the time at which they leave, and a hash, of amounts by member; its
--       field '' has their sum. Then, of what may be sent twice, a sorted set of the numbers that one process had done;
--       the score of member '' is the lowest that is not forgotten.
-- ARGV: what is done, the member, and for each window its kind (window, day), limit (-1: none), amount and length. Then,
--       of what may be sent twice, its number, and the lowest that its process may send again.
--   take    add the amounts to all windows, or to none if one of them has no room
--   put     add them whatever the limits are; a member that is there stays as long again
--   change  a member that is there has so much more, or less; of no amount it is none. The member of a day is its number,
--           '' for today
-- Returns which window has no room (0: none), the time until it has, the day since 1970, and for each window what is
-- taken and when all of it is free.
if redis.replicate_commands then redis.replicate_commands() end -- before Redis 7: what follows depends on the time
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local DAY, SOME, KEPT = 86400000000, 500, 172800
local today = math.floor(now / DAY)
local mode = ARGV[1]

local function again() -- whether it was done; from now on it was
  local done, number, lowest = KEYS[#KEYS], ARGV[#ARGV - 1], ARGV[#ARGV]
  local known = tonumber(redis.call('ZSCORE', done, '') or 0)
  if tonumber(number) < known or redis.call('ZSCORE', done, number) then return true end
  if tonumber(lowest) > known then
    redis.call('ZREMRANGEBYSCORE', done, '-inf', '(' .. lowest)
    redis.call('ZADD', done, lowest, '')
  end
  redis.call('ZADD', done, number, number)
  redis.call('EXPIRE', done, KEPT)
  return false
end

local function window(number)
  local at = 2 + 4 * (number - 1)
  local one = {
    expiries = KEYS[2 * number - 1], amounts = KEYS[2 * number], member = ARGV[2],
    limit = tonumber(ARGV[at + 2]), amount = tonumber(ARGV[at + 3]), length = tonumber(ARGV[at + 4]),
  }
  one.ends = now + one.length
  if ARGV[at + 1] == 'day' then
    one.member, one.ends = 'day ' .. (mode == 'change' and ARGV[2] ~= '' and ARGV[2] or today), (today + 1) * DAY
  end
  return one
end

local function sum(one)
  return tonumber(redis.call('HGET', one.amounts, '') or 0)
end

local function sweep(one)
  while true do
    local gone = redis.call('ZRANGEBYSCORE', one.expiries, '-inf', now, 'LIMIT', 0, SOME)
    if #gone == 0 then return end
    for _, member in ipairs(gone) do
      redis.call('HINCRBY', one.amounts, '', -(redis.call('HGET', one.amounts, member) or 0))
    end
    redis.call('HDEL', one.amounts, unpack(gone))
    redis.call('ZREM', one.expiries, unpack(gone))
  end
end

local function wait(one)
  local excess, from = sum(one) + one.amount - one.limit, 0
  while true do
    local some = redis.call('ZRANGE', one.expiries, from, from + SOME - 1, 'WITHSCORES')
    for i = 1, #some, 2 do
      excess = excess - (redis.call('HGET', one.amounts, some[i]) or 0)
      if excess <= 0 then return some[i + 1] - now end
    end
    if #some == 0 then return one.length end
    from = from + SOME
  end
end

local function add(one, amount)
  redis.call('HINCRBY', one.amounts, one.member, amount)
  redis.call('HINCRBY', one.amounts, '', amount)
  redis.call('EXPIRE', one.amounts, KEPT)
end

local function put(one, amount)
  redis.call('ZADD', one.expiries, one.ends, one.member)
  redis.call('EXPIRE', one.expiries, KEPT)
  if amount ~= 0 then add(one, amount) end
end

if #KEYS % 2 == 1 and again() then return {0, 0, today} end
local windows, refused = {}, 0
for number = 1, math.floor(#KEYS / 2) do
  local one = window(number)
  sweep(one)
  if mode == 'take' and refused == 0 and one.limit >= 0 and sum(one) + one.amount > one.limit then
    refused = number
  end
  windows[number] = one
end
for _, one in ipairs(windows) do
  local there = redis.call('ZSCORE', one.expiries, one.member)
  if mode == 'take' and refused == 0 then
    put(one, one.amount)
  elseif mode == 'put' then
    put(one, (there and ARGV[2] == one.member) and 0 or one.amount)
  elseif mode == 'change' and there then
    add(one, one.amount)
    if tonumber(redis.call('HGET', one.amounts, one.member)) == 0 then
      redis.call('ZREM', one.expiries, one.member)
      redis.call('HDEL', one.amounts, one.member)
    end
  end
end

local answer = {refused, refused > 0 and wait(windows[refused]) or 0, today}
for _, one in ipairs(windows) do
  local last = redis.call('ZRANGE', one.expiries, -1, -1, 'WITHSCORES')
  answer[#answer + 1] = sum(one)
  answer[#answer + 1] = last[2] and last[2] - now or 0
end
return answer
